"""Transports of weights from the learner to the engines: shared memory, a gloo broadcast, files, or GPU to GPU.

A transport gives each engine an `IncomingWeights` and starts the sender. It is done when every engine has adopted the
version.

Engines that already hold the base weights can be sent a LoRA adapter alone. This includes the first transfer of a run:
engines load the base weights themselves, and the canary verifies what they compute.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ProcessError, SkyRLError, WeightSyncError
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.processes.private_folder import make_own_folder
from skyrl.storage.places import is_address, storage_at
from skyrl.weight_receiver.incoming_weights import (
    Adapter,
    BroadcastWeights,
    DeltaWeights,
    FolderWeights,
    IncomingWeights,
    SGLangGroupWeights,
    SharedWeights,
    VLLMNativeWeights,
    WeightInfo,
)
from skyrl.weight_receiver.transfer_group import TransferGroup
from skyrl.weight_sync.senders import BUCKET_BYTES, BroadcastSender, DeltaSender, FolderSender
from skyrl.weight_sync.sglang_group import SGLangGroupSender
from skyrl.weight_sync.vllm_native import VLLMNativeSender

R = TypeVar("R")

Weight = tuple[str, Tensor]
"""Name and value of a weight."""

ADAPTER_DTYPE = "float32"
"""Dtype in which adapters are sent, the one in which they are trained."""

_MOST_STORED = 2.0
"""Largest size of a delta's files, as a multiple of the size of all weights. Beyond it, all weights are written."""


class WeightSource(Protocol):
    """The holder of the newest weights: a learner, on one rank or many."""

    async def export_weights(
        self,
        consume: Callable[[Iterator[Weight]], R],
        *,
        everywhere: bool = False,
        adapter: bool = False,
        dtype: str | None = None,
    ) -> R:
        """Call `consume` on the first rank with the name and the value, in its whole shape, of every weight, each tied
        weight once, and return its result.

        With `everywhere`, `consume` runs on every rank, each of which has all weights; with `adapter`, it gets only the
        tensors of the adapter. `dtype` is the type to which `consume` rounds all of them, if there is one: the source
        may then round them itself.
        """

    async def shapes(self, *, adapter: bool = False) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Name and shape of each weight, in the order of `export_weights`."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) log-probabilities of the sampled tokens under these weights, in nats."""


class WeightTransport(Protocol):
    """One way to transfer weights from the learner to the engines."""

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        """Transfer the source's weights, as `version`, to every engine in service.

        Called while engines are paused. Raises `WeightSyncError`; an engine then holds its old weights or has left
        service.
        """


class SharedTransport:
    """Learner and engines are in this process: an engine copies from the learner's own tensors."""

    def __init__(self, lora: SkyRLLoraConfig | None = None) -> None:
        """With `lora`, only the adapter of these settings is sent."""
        self._lora = lora

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        incoming = SharedWeights(await source.export_weights(tuple, adapter=self._lora is not None))
        await client.load_weights([_adapter_tensors(incoming, self._lora)] * len(client.in_service), version)


class TransferRendezvous:
    """Creates transfer groups over the driver's `TCPStore`: ranks of the learner, then the workers of each engine."""

    def __init__(self, host: str, port: int, *, workers: int = 1, timeout: float) -> None:
        """`workers` is the number of workers of one engine; `timeout`, in seconds, limits each message and joining."""
        self._host, self._port, self._workers, self._timeout = host, port, workers, timeout
        self._names = (f"weights-{secrets.token_hex(4)}-{number}" for number in count())

    def new_group(self, engines: int, *, senders: int = 1) -> tuple[TransferGroup, list[TransferGroup]]:
        """A new transfer group: with the rank of the learner's first process, and with that of each engine's first
        worker.
        """
        size = senders + engines * self._workers
        first = TransferGroup(
            host=self._host, port=self._port, name=next(self._names), rank=0, size=size, timeout=self._timeout
        )
        return first, [first.with_rank_offset(senders + engine * self._workers) for engine in range(engines)]


@frozen
class GroupTransport(ABC):
    """Sends through a new transfer group of the learner and the engines for each transfer."""

    rendezvous: TransferRendezvous

    dtype: str = field(kw_only=True)
    """Dtype to which weights are rounded before they are sent."""

    senders: int = field(kw_only=True, default=1)
    """Number of the learner's ranks that send, each of which has all weights."""

    lora: SkyRLLoraConfig | None = field(kw_only=True, default=None)
    """Settings of the adapter if only that is sent. An adapter is not rounded: it is sent as it was trained."""

    @abstractmethod
    def sender(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> Callable[[Iterator[Weight]], None]:
        """The learner's end of the transfer."""

    @abstractmethod
    def incoming(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> IncomingWeights:
        """An engine's end of the transfer."""

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        """Transfer the weights; see `WeightTransport`."""
        is_adapter = self.lora is not None
        weights = _infos(await source.shapes(adapter=is_adapter), self.dtype)
        sender_group, receiver_groups = self.rendezvous.new_group(len(client.in_service), senders=self.senders)
        incoming = [_adapter_tensors(self.incoming(group, weights), self.lora) for group in receiver_groups]
        sending = source.export_weights(
            self.sender(sender_group, weights),
            everywhere=self.senders > 1,
            adapter=is_adapter,
            dtype=None if is_adapter else self.dtype,
        )
        await send_both(client.load_weights(incoming, version, sender_group.abort), sending, sender_group.abort)


class BroadcastTransport(GroupTransport):
    """The learner's first rank sends to all engines at once, through shared memory if all are on its machine, otherwise
    over gloo; each side holds one bucket in memory.

    One process of each engine joins the group for an adapter, and all of its workers for weights.
    """

    def sender(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> BroadcastSender:
        return BroadcastSender(group=group, dtype=self.dtype)

    def incoming(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> BroadcastWeights:
        return BroadcastWeights(group=group, weights=weights)


@frozen
class VLLMNativeTransport(GroupTransport):
    """vLLM's own weight transfer: NCCL from the learner's first rank, or CUDA IPC from all that share their GPUs."""

    backend: str = field(kw_only=True)
    """`nccl`, or `ipc`, with which all ranks of the learner are senders."""

    bucket_bytes: int = field(kw_only=True)
    """Bytes that are sent at a time with `ipc`."""

    def sender(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> VLLMNativeSender:
        return VLLMNativeSender(
            group=group,
            backend=self.backend,
            senders=self.senders,
            weights=weights,
            bucket_bytes=self.bucket_bytes,
        )

    def incoming(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> VLLMNativeWeights:
        return VLLMNativeWeights(group=group, backend=self.backend, weights=weights)


@frozen
class SGLangGroupTransport(GroupTransport):
    """SGLang's own weight update: the learner's first rank broadcasts to the workers of all servers, in a group that it
    leads. The transfer group has one member for each server.
    """

    backend: str = field(kw_only=True)
    """Backend of the update group: `nccl` or `gloo`."""

    workers: int = field(kw_only=True)
    """Number of processes of each server that join the update group."""

    bucket_bytes: int = field(kw_only=True, default=BUCKET_BYTES)
    """Bytes that the workers receive at a time."""

    def sender(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> SGLangGroupSender:
        return SGLangGroupSender(
            group=group,
            workers=self.workers,
            backend=self.backend,
            dtype=self.dtype,
            bucket_bytes=self.bucket_bytes,
        )

    def incoming(self, group: TransferGroup, weights: tuple[WeightInfo, ...]) -> SGLangGroupWeights:
        return SGLangGroupWeights(group=group, workers=self.workers, weights=weights)


class FolderTransport:
    """The learner writes files that the engines read: for engines that share a disk with it, but no network."""

    def __init__(self, path: Path, *, dtype: str, lora: SkyRLLoraConfig | None = None) -> None:
        """`path`: a folder that learner and engines see under this name. With `lora`, only the adapter of these
        settings is sent.
        """
        self._path, self._dtype, self._lora = path, dtype, lora

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        is_adapter = self._lora is not None
        infos = _infos(await source.shapes(adapter=is_adapter), self._dtype)
        try:
            await asyncio.to_thread(make_own_folder, self._path)
            with tempfile.TemporaryDirectory(dir=self._path, prefix=f"version-{version}-") as folder:
                await source.export_weights(
                    FolderSender(path=folder, dtype=self._dtype),
                    adapter=is_adapter,
                    dtype=None if is_adapter else self._dtype,
                )
                incoming = _adapter_tensors(FolderWeights(path=folder, weights=infos), self._lora)
                await client.load_weights([incoming] * len(client.in_service), version)
        except OSError as error:
            payload = "the adapter" if is_adapter else "the weights"
            raise WeightSyncError(f"{payload} cannot be written to {self._path}: {error}") from error


class DeltaTransport:
    """The learner writes the weights that changed since the last transfer; engines read the ones they do not hold.

    Frozen weights, and weights that the optimizer hardly moves, do not change when rounded to bfloat16. Each receiving
    process keeps a copy of all weights in host memory.
    """

    def __init__(self, path: Path | str, *, dtype: str) -> None:
        """`path`: a folder that learner and engines see under this name, or its address in an object store. Files of an
        earlier run in its subfolder `delta` are removed.
        """
        self._path, self._dtype = f"{path}/delta", dtype
        self._storage = storage_at(self._path)
        self._base: dict[str, dict[str, str]] | None = None
        self._numbers = count()

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        infos = _infos(await source.shapes(), self._dtype)
        try:
            base = await asyncio.to_thread(self._prepare, infos)
            sender = DeltaSender(path=self._path, dtype=self._dtype, prefix=f"{next(self._numbers):06}", base=base)
            self._base = await source.export_weights(sender, dtype=self._dtype)
            incoming = DeltaWeights(path=self._path, files=self._base, weights=infos)
            await client.load_weights([incoming] * len(client.in_service), version)
            for name in await asyncio.to_thread(self._storage.names):
                if name not in self._base:
                    await asyncio.to_thread(self._storage.remove, name)
        except OSError as error:
            raise WeightSyncError(f"the weights cannot be written to {self._path}: {error}") from error

    def _prepare(self, infos: Sequence[WeightInfo]) -> dict[str, dict[str, str]]:
        """The base of the next version. It is empty if there is none, or if its files take more than twice the space of
        all weights: a file stays as long as one weight in it is current.
        """
        if not is_address(self._path):
            make_own_folder(Path(self._path).parent)
        if self._base is None:
            self._storage.remove("")
        if not is_address(self._path):
            make_own_folder(Path(self._path))
        base = self._base or {}
        stored = sum(map(self._storage.size, base))
        total = sum(math.prod(info.shape) * getattr(torch, info.dtype).itemsize for info in infos)
        return base if stored <= _MOST_STORED * total else {}


def _adapter_tensors(tensors: IncomingWeights, lora: SkyRLLoraConfig | None) -> IncomingWeights:
    """The tensors as those of an adapter with these settings, if there are some."""
    return tensors if lora is None else Adapter(tensors=tensors, rank=lora.rank, alpha=lora.alpha)


def _infos(shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: str) -> tuple[WeightInfo, ...]:
    return tuple(WeightInfo(name=name, shape=tuple(shape), dtype=dtype) for name, shape in shapes)


async def send_both(
    loading: Coroutine[Any, Any, None], sending: Coroutine[Any, Any, None], abort: Callable[[str], None]
) -> None:
    """Wait for both ends. If one fails, the other is aborted instead of cancelled: its processes leave the transfer."""
    await gather_or_cancel(
        [loading, sending],
        end_others=lambda error: asyncio.to_thread(abort, str(error)),
        rank=_order_of_causes,
    )


def _order_of_causes(error: BaseException) -> int:
    """Rank of an error; the lowest one is raised. A process that ended ranks before the errors that it causes, and
    errors of this library before those of others. Among equals the engines' error precedes the sender's, its echo.
    """
    return 0 if isinstance(error, ProcessError) else 1 if isinstance(error, SkyRLError) else 2
