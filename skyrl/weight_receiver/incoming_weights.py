"""New weights for an engine, as seen by the process that holds the engine's model.

    learner --weight_sync--> IncomingWeights --> engine.load_weights(incoming, version)

There is one kind of `IncomingWeights` for each transport. An engine reads `weights` first and refuses a set that
does not fit before it changes anything; then it opens the set where its model lives, and receives tensor after tensor.
Bytes are compared with the digest that was sent with them before the engine sees them, or, where vLLM receives them
itself, after it has loaded them (`vllm_native.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
import xxhash
from attrs import field, frozen
from attrs.validators import instance_of
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skyrl.errors import UserError, WeightSyncError
from skyrl.storage.places import here, is_address
from skyrl.weight_receiver.transfer_group import Channel, TransferGroup

Weights = Iterator[tuple[str, Tensor]]
"""Name and value of each of some weights."""


@frozen(kw_only=True)
class WeightInfo:
    """Description of a weight, known before the weight is received."""

    name: str
    """Name in the state dict of the Hugging Face model."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the type, without the module: `float32`, `bfloat16`."""


class IncomingWeights(Protocol):
    """A complete set of weights, each tied weight once, or the tensors of an adapter alone (`Adapter`). It can be
    pickled, and is opened where the engine's model lives.
    """

    @property
    def weights(self) -> Sequence[WeightInfo]:
        """Descriptions of all weights that will arrive, in order."""

    def open(self) -> AbstractContextManager[Weights]:
        """Name and value of each weight, with its whole shape, as it is received, on the CPU or on the device that the
        transport delivers to.

        A tensor stays valid as long as it is held, and must not be changed: its memory may be the sender's. The
        iterator raises `WeightSyncError` for bytes that differ from those sent, for a missing weight, and if the sender
        is gone.
        """


@attrs.frozen
class SharedWeights:
    """Weights in the memory of this process: nothing is sent."""

    tensors: tuple[tuple[str, Tensor], ...]

    @property
    def weights(self) -> tuple[WeightInfo, ...]:
        return tuple(weight_info(name, tensor) for name, tensor in self.tensors)

    def open(self) -> AbstractContextManager[Weights]:
        return nullcontext(iter(self.tensors))


@frozen(kw_only=True)
class Adapter:
    """`IncomingWeights` of an adapter alone."""

    tensors: IncomingWeights
    rank: int
    alpha: float

    @property
    def weights(self) -> Sequence[WeightInfo]:
        return self.tensors.weights

    def open(self) -> AbstractContextManager[Weights]:
        return self.tensors.open()


@frozen(kw_only=True)
class FolderWeights:
    """Weights in safetensors files of a folder that learner and engine share."""

    path: str = field(validator=instance_of(str))
    weights: tuple[WeightInfo, ...]

    def open(self) -> AbstractContextManager[Weights]:
        return nullcontext(verified(self._read_tensors(), self.weights))

    def digests(self) -> dict[str, str]:
        """Digests of all tensors as sent, by name. Raises `WeightSyncError`."""
        by_name: dict[str, str] = {}
        try:
            for index in sorted(Path(self.path).glob("*.json")):
                by_name |= _digests(index.read_bytes())
        except OSError as error:
            raise WeightSyncError(f"the weights in {self.path} cannot be read: {error}") from error
        return by_name

    def _read_tensors(self) -> Iterator[tuple[str, Tensor, str]]:
        try:
            for index in sorted(Path(self.path).glob("*.json")):
                digests = _digests(index.read_bytes())
                with safe_open(index.with_suffix(".safetensors"), framework="pt") as file:
                    for name, digest in digests.items():
                        yield name, file.get_tensor(name), digest
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"the weights in {self.path} cannot be read: {error}") from error


DeltaFiles = Mapping[str, Mapping[str, str]]
"""File name -> name of each weight that is current in it -> its digest. A weight is current in exactly one file."""

_HELD: dict[str, dict[str, tuple[str, Tensor]]] = {}
"""Folder -> weight -> digest and value, as this process last received it: the base that a delta is applied to."""


@frozen(kw_only=True)
class DeltaWeights:
    """Weights in files of a shared folder, or of an object store, to which each version adds those that changed.

    A weight that this process holds with the same digest is taken from memory; any other one is read. A process that
    holds no base reads all of them.
    """

    path: str = field(validator=instance_of(str))
    files: DeltaFiles
    weights: tuple[WeightInfo, ...]

    def open(self) -> AbstractContextManager[Weights]:
        return nullcontext(verified(self._values(), self.weights))

    def digests(self) -> dict[str, str]:
        """Digests of all tensors as sent, by name."""
        return {name: item for digests in self.files.values() for name, item in digests.items()}

    def _values(self) -> Iterator[tuple[str, Tensor, str]]:
        for gone in [path for path in list(_HELD) if not (is_address(path) or Path(path).is_dir())]:
            _HELD.pop(gone, None)
        cache = _HELD.setdefault(self.path, {})
        for file, digests in self.files.items():
            missing: dict[str, str] = {}
            for name, digest in digests.items():
                stored = cache.pop(name, None)  # put back after it was verified
                if stored is None or stored[0] != digest:
                    missing[name] = digest
                    continue
                yield name, stored[1], digest
                cache[name] = stored
            for name, tensor in self._read_tensors(file, missing) if missing else ():
                yield name, tensor, missing[name]
                cache[name] = missing[name], tensor

    def _read_tensors(self, file: str, names: Iterable[str]) -> Weights:
        try:
            with here(self.path, file) as path, safe_open(path, framework="pt") as stored:
                for name in names:
                    yield name, stored.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"the weights in {self.path} cannot be read: {error}") from error


@frozen(kw_only=True)
class BroadcastWeights:
    """Weights that the learner sends to every engine at once, through shared memory or over gloo."""

    group: TransferGroup
    """The transfer group, with the rank of this engine's first worker in it."""

    weights: tuple[WeightInfo, ...]

    @contextmanager
    def open(self) -> Iterator[Weights]:
        with self.group.join() as group:
            yield verified(self._receive(group), self.weights)

    def _receive(self, group: Channel) -> Iterator[tuple[str, Tensor, str]]:
        infos = {info.name: info for info in self.weights}
        while header := _digests(group.receive_bytes().numpy().tobytes()):
            payload = group.receive_bytes()
            start = 0
            for name, digest in header.items():
                if name not in infos:
                    raise WeightSyncError(f"{name} arrived, which was not announced")
                info = infos[name]
                dtype = getattr(torch, info.dtype)
                size = torch.Size(info.shape).numel() * dtype.itemsize
                if start + size > len(payload):
                    raise WeightSyncError(f"{name} has {size} bytes, and {max(0, len(payload) - start)} came")
                yield name, payload[start : start + size].view(dtype).reshape(info.shape), digest
                start += size


@frozen(kw_only=True)
class VLLMNativeWeights:
    """Weights that vLLM's own transfer engines send from GPU to GPU; `vllm_native.py` receives them."""

    group: TransferGroup
    """The transfer group in which the learner announces each step, with the rank of this engine's first worker."""

    backend: str = field(validator=instance_of(str))
    """`nccl`, `ipc`, or another name that is registered with vLLM's `WeightTransferEngineFactory`."""

    weights: tuple[WeightInfo, ...]

    def open(self) -> AbstractContextManager[Weights]:
        raise UserError(
            f"generator.inference_engine.weight_sync_backend = nccl sends weights by vLLM's {self.backend} transfer, "
            "which only vLLM engines take: set it to gloo"
        )


@frozen(kw_only=True)
class SGLangGroupWeights:
    """Weights that the workers of an SGLang server receive from a process group that the learner leads;
    `inference/servers/sglang_server.py` sends the requests.
    """

    group: TransferGroup
    """The transfer group in which the learner announces each step, with the rank of the process that sends requests to
    this server."""

    workers: int
    """Number of the server's processes that receive weights."""

    weights: tuple[WeightInfo, ...]

    def open(self) -> AbstractContextManager[Weights]:
        raise UserError("only a server of SGLang takes weights by its own update group")


LOADED = "loaded"
"""First word of an acknowledgement."""


def acknowledgement(incoming: IncomingWeights) -> str:
    """What this library's code answers once it has compared a set of weights with its digests and loaded it: a word,
    and a digest of the digests of all tensors if the set comes as files. A receiver in a group needs none: the sender
    notices if it does not join.
    """
    if not isinstance(incoming, FolderWeights | DeltaWeights):
        return LOADED
    lines = "".join(f"{name} {item}\n" for name, item in sorted(incoming.digests().items()))
    return f"{LOADED} {xxhash.xxh3_128_hexdigest(lines.encode())}"


def load_failure(outcomes: Iterable[object], incoming: IncomingWeights) -> str:
    """An empty string if every outcome is the acknowledgement of these weights, otherwise the reason why one is not."""
    expected = acknowledgement(incoming)
    others = sorted({str(outcome or "") for outcome in outcomes} - {expected})
    if not others:
        return ""
    silent = not others[0] or others[0].startswith(LOADED)
    return f"the receiver does not show that it loaded what was sent ({others[0]!r})" if silent else "; ".join(others)


RemoteWeights = FolderWeights | DeltaWeights | BroadcastWeights | VLLMNativeWeights
"""Sets of weights that travel between processes."""

_KINDS: dict[str, type[RemoteWeights]] = {
    "folder": FolderWeights,
    "delta": DeltaWeights,
    "broadcast": BroadcastWeights,
    "native": VLLMNativeWeights,
}


def as_plain(incoming: RemoteWeights) -> dict[str, Any]:
    """The set as JSON-compatible data, for connections that must not carry pickles; `from_plain` rebuilds it."""
    (kind,) = [name for name, kind_class in _KINDS.items() if isinstance(incoming, kind_class)]
    return {"kind": kind, **attrs.asdict(incoming)}


def from_plain(plain: Mapping[str, Any]) -> RemoteWeights:
    """The set of weights that `as_plain` described. Raises `WeightSyncError` for anything else."""
    try:
        members = {name: value for name, value in plain.items() if name != "kind"}
        members["weights"] = tuple(_info(**info) for info in plain["weights"])
        if "files" in members:
            members["files"] = {_file_name(file): _texts(digests) for file, digests in plain["files"].items()}
        if "group" in members:
            members["group"] = TransferGroup(**plain["group"])
        return _KINDS[plain["kind"]](**members)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(
            f"the announcement of new weights is not in skyrl's format ({type(error).__name__}: {error})"
        ) from error


def _file_name(name: object) -> str:
    """Validates the received name of a file. Raises `ValueError` for one that leaves the folder."""
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ValueError(f"not a file name: {name!r}")
    return name


def _texts(digests: Mapping[str, object]) -> dict[str, str]:
    """Validates received digests by name. Raises `ValueError` unless all of them are strings."""
    if not all(isinstance(entry, str) for pair in digests.items() for entry in pair):
        raise ValueError("digests of weights must be strings")
    return {name: str(item) for name, item in digests.items()}


def _info(name: object, shape: Sequence[object], dtype: object) -> WeightInfo:
    """Validates the received description of a weight. Raises `TypeError` or `ValueError`."""
    sizes = tuple(size for size in shape if type(size) is int and size >= 0)
    if not isinstance(name, str) or len(sizes) != len(shape):
        raise ValueError(f"not a name and a shape: {name!r}, {shape!r}")
    if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{dtype!r} is not a torch dtype")
    return WeightInfo(name=name, shape=sizes, dtype=dtype)


def _digests(message: bytes) -> dict[str, str]:
    """Decodes a sender's message with the digests, by name, of the weights that follow. Raises `WeightSyncError`."""
    try:
        digests = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise WeightSyncError(f"the digests of weights were corrupted in transit: {error}") from error
    if not isinstance(digests, dict) or not all(isinstance(item, str) for item in digests.values()):
        raise WeightSyncError("the digests of weights were corrupted in transit: they are not an object of strings")
    return digests


def with_worker_rank(incoming: IncomingWeights, worker: int) -> IncomingWeights:
    """The set as worker number `worker` of an engine opens it: with its own rank if weights come through a group,
    otherwise the same.
    """
    if isinstance(incoming, BroadcastWeights | VLLMNativeWeights):
        return attrs.evolve(incoming, group=incoming.group.with_rank_offset(worker))
    return incoming


def weight_info(name: str, tensor: Tensor) -> WeightInfo:
    """The description of a weight of any shape."""
    return WeightInfo(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def digest(tensor: Tensor) -> str:
    """xxh3-128 of the bytes of a tensor of any shape. It detects accidental changes, not attacks."""
    return xxhash.xxh3_128_hexdigest(as_bytes(tensor).numpy().data)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of any shape as flat uint8, (bytes,), on the CPU; a copy only if the tensor is on another
    device or not contiguous.
    """
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def summarize_problems(problems: Sequence[str]) -> str:
    """The first five problems of a set of weights, and the number of others."""
    more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
    return "; ".join([*problems[:5], *more])


def verified(arriving: Iterator[tuple[str, Tensor, str]], announced: Sequence[WeightInfo]) -> Weights:
    """Name and tensor, of any shape, of each arriving (name, tensor, digest as sent), after it was compared with its
    announcement and its digest.

    Raises `WeightSyncError`, also at the end if a weight did not arrive.
    """
    missing = {info.name: info for info in announced}
    for name, tensor, sent in arriving:
        if missing.pop(name, None) != weight_info(name, tensor):
            raise WeightSyncError(
                f"{name} arrived twice, unannounced, or with a different shape or type than announced"
            )
        received = digest(tensor)
        if received != sent:
            raise WeightSyncError(f"{name} was changed in transit: digest {received} arrived, {sent} was sent")
        yield name, tensor
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightSyncError(f"{next(iter(missing))}{more} did not arrive")
