"""The learner's end of each transport: takes the weights one by one and sends them with their digests, through shared
memory or over gloo, as files, or through the weight transfer of vLLM or SGLang: NCCL between GPUs, CUDA IPC on shared
ones.

A sender runs where the weights are gathered, in the process of the learner's first rank, so it can be pickled.
"""

from __future__ import annotations

import importlib
import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from safetensors.torch import save
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from skyrl.storage.modes import save_tensors
from skyrl.storage.places import is_address, storage_at
from skyrl.weight_receiver.checksums import Digests, is_hashed_at_once
from skyrl.weight_receiver.incoming_weights import DeltaFiles, WeightInfo, Weights, as_bytes, digest, weight_info
from skyrl.weight_receiver.transfer_group import END, RequestSender, TransferGroup
from skyrl.weight_receiver.vllm_native import plain_handle

T = TypeVar("T")

_VLLM_TRANSFER = "vllm.distributed.weight_transfer"

_CONNECT_SECONDS = 60.0
"""Number of seconds in which the workers of SGLang's servers must join the group after they were asked to."""

_POLL_SECONDS = 0.05

BUCKET_BYTES = 256 * 2**20
"""Size in bytes of weights that are sent together: large enough to fill a connection, small compared with a model."""


@frozen(kw_only=True)
class BroadcastSender:
    """Sends to every engine of the group at once; `incoming_weights.BroadcastWeights` is the other end."""

    group: TransferGroup
    dtype: str
    """Dtype to which weights are rounded before they are sent."""

    def __call__(self, weights: Weights) -> None:
        """Send the weights. Raises `WeightSyncError` if an engine does not join or leaves."""
        with self.group.join() as channel:
            for bucket in buckets(weights, self.dtype):
                channel.send_bytes(_encoded({name: digest(tensor) for name, tensor in bucket.items()}))
                channel.send_bytes(*map(as_bytes, bucket.values()))
            channel.send_bytes(_encoded({}))


@frozen(kw_only=True)
class FolderSender:
    """Writes files that engines read; `incoming_weights.FolderWeights` is the other end."""

    path: str
    """An empty folder."""

    dtype: str

    def __call__(self, weights: Weights) -> None:
        """Write one `NNNNN.safetensors` per bucket, then its digests beside it as JSON."""
        for number, bucket in enumerate(buckets(weights, self.dtype)):
            file = Path(self.path) / f"{number:05}.safetensors"
            save_tensors(bucket, file)
            digests = {name: digest(tensor) for name, tensor in bucket.items()}
            file.with_suffix(".json").write_text(json.dumps(digests), encoding="utf-8")


@frozen(kw_only=True)
class DeltaSender:
    """Writes the weights that differ from a base version; `incoming_weights.DeltaWeights` reads them."""

    path: str
    """The folder that holds the files of the base, or its address in an object store."""

    dtype: str

    prefix: str
    """Prefix of the names of new files, which no earlier file has."""

    base: DeltaFiles
    """Files of the last transfer, with digests; empty to write all weights."""

    def __call__(self, weights: Weights) -> dict[str, dict[str, str]]:
        """Write the changed weights. Returns the files of the new version, with digests: files of the base in which
        weights are still current, and new ones.
        """
        known = {name: (file, stored) for file, digests in self.base.items() for name, stored in digests.items()}
        files: dict[str, dict[str, str]] = {}
        for number, bucket in enumerate(buckets(self._changed(weights, known, files), self.dtype)):
            file = f"{self.prefix}-{number:05}.safetensors"
            if is_address(self.path):
                storage_at(self.path).write(file, [save(bucket)])
            else:
                save_tensors(bucket, Path(self.path) / file)
            files[file] = {name: digest(tensor) for name, tensor in bucket.items()}
        return files

    def _changed(
        self, weights: Weights, known: Mapping[str, tuple[str, str]], files: dict[str, dict[str, str]]
    ) -> Weights:
        """Rounded tensors whose digest differs from `known`; the others are added to `files` under their old file."""
        for name, tensor in weights:
            rounded = tensor.detach().to("cpu", getattr(torch, self.dtype)).contiguous()
            file, before = known.get(name, ("", ""))
            if before == digest(rounded):
                files.setdefault(file, {})[name] = before
            else:
                yield name, rounded


def buckets(
    weights: Weights, dtype: str, bucket_bytes: int = BUCKET_BYTES, *, device: str = "cpu"
) -> Iterator[dict[str, Tensor]]:
    """The weights in order, each with its whole shape, rounded to `dtype`, on `device`, in non-empty buckets of about
    `bucket_bytes` bytes.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        bucket[name] = tensor.detach().to(device, getattr(torch, dtype)).contiguous()
        size += bucket[name].nbytes
        if size >= bucket_bytes:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _encoded(header: dict[str, str]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)


@frozen(kw_only=True)
class VLLMNativeSender:
    """Sends weights through vLLM's transfer `backend`; `incoming_weights.VLLMNativeWeights` is the other end.

    vLLM's trainer engine decides what its workers have to do; `_Workers` passes that on to them, and compares digests
    before the update is finished. Digests are computed on the GPU: the weights do not leave it.
    With CUDA IPC every rank of the learner sends to the worker that shares its GPU; otherwise only the first sends.
    """

    group: TransferGroup
    """The transfer group with the rank of the learner's first process; the other ranks follow it."""

    backend: str
    senders: int
    """Number of the learner's ranks that run this sender."""

    weights: tuple[WeightInfo, ...]
    bucket_bytes: int
    """Number of bytes handed over at a time through CUDA IPC."""

    def __call__(self, weights: Weights) -> None:
        """Send the weights. Raises `WeightSyncError` if an engine does not join, leaves, or received other bytes."""
        rank = dist.get_rank() if self.senders > 1 else 0
        with self.group.with_rank_offset(rank).rendezvous() as members:
            receivers = range(self.senders, self.group.size)
            workers = _Workers(RequestSender(members, receivers=receivers, timeout=self.group.timeout))
            factory = importlib.import_module(f"{_VLLM_TRANSFER}.factory").WeightTransferTrainerFactory
            source = _source(self.weights, weights, workers.digests)
            engine = factory.trainer_init(self._init_info(rank), client=workers, source=source)
            try:
                engine.send_weights()
                if rank == 0:
                    workers.end()
            finally:
                engine.shutdown()

    def _init_info(self, rank: int) -> object:
        if self.backend == "ipc":
            module = importlib.import_module(f"{_VLLM_TRANSFER}.ipc_engine")
            total = sum(math.prod(info.shape) * _dtype(info).itemsize for info in self.weights)
            size = min(self.bucket_bytes, total)
            return module.IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
        host, port = free_address(self.group.host)
        return INIT_INFOS[self.backend](rank=rank, master_address=host, master_port=port, world_size=self.group.size)


INIT_INFOS: dict[str, Callable[..., Any]] = {
    "nccl": lambda **fields: importlib.import_module(f"{_VLLM_TRANSFER}.nccl_engine").NCCLTrainerInitInfo(**fields)
}
"""Initialization arguments of vLLM's sending engine by transfer backend."""


class _Workers:
    """vLLM's `VLLMWeightSyncClient`: the workers of all engines at once."""

    def __init__(self, requests: RequestSender) -> None:
        self._requests = requests
        self.digests = Digests()
        """Digests of the tensors that were sent, still on their device."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._requests.send("init", init_info)

    def start_weight_update(self) -> None:
        self._requests.send("start", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        handles = update_info.pop("ipc_handles", None)
        if handles is not None:
            update_info["ipc_handles"] = {gpu: plain_handle(arguments) for gpu, arguments in handles.items()}
            del update_info["ipc_handles_pickled"]
        self._requests.send("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._requests.send("compare", {"digests": self.digests.in_hex()})
        self._requests.send("finish", {})

    def end(self) -> None:
        self._requests.send(END, {})


def _source(infos: Sequence[WeightInfo], weights: Weights, digests: Digests) -> object:
    """The weights as vLLM's `WeightSource`, rounded to the announced dtype; their digests are added to `digests`."""
    base = importlib.import_module(f"{_VLLM_TRANSFER}.base")

    class Source(base.WeightSource):  # type: ignore[misc, name-defined]  # the base comes with vLLM
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name=info.name, dtype=_dtype(info), shape=info.shape) for info in infos]

        def __iter__(self) -> Weights:
            for info, (name, tensor) in zip(infos, weights, strict=True):
                later = not is_hashed_at_once(math.prod(info.shape) * _dtype(info).itemsize)
                rounded = tensor.detach().to(_dtype(info), copy=later).contiguous()  # the next value may replace it
                digests.add(name, rounded)
                yield name, rounded

    return Source()


def _dtype(info: WeightInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, info.dtype)
    return dtype


def free_address(driver: str) -> tuple[str, int]:
    """An address of this process that every process which can reach the driver can reach, and a free port there."""
    family, _, _, _, address = socket.getaddrinfo(driver, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only selects the route
        host = probe.getsockname()[0]
    with socket.socket(family) as free:
        free.bind((host, 0))
        return str(host), int(free.getsockname()[1])


@frozen(kw_only=True)
class SGLangGroupSender:
    """Sends to servers of SGLang; `skyrl.weight_receiver.incoming_weights.SGLangGroupWeights` is the other end.

    Members of the transfer group are the learner's first rank and, for each server, the process that sends requests to
    it. The servers' workers join the process group that the learner creates, and through which it broadcasts tensors,
    by the routes `init_weights_update_group` and `update_weights_from_distributed`. Digests are not sent: the canary
    proves that every server computes with the weights that were sent.
    """

    group: TransferGroup
    """The transfer group, with the rank of the learner's first process; every other member sends requests to one
    server."""

    workers: int
    """Number of processes of one server that receive weights."""

    backend: str
    """`nccl`, or `gloo`."""

    dtype: str
    """Dtype to which weights are rounded before they are sent."""

    bucket_bytes: int = BUCKET_BYTES
    """Number of bytes that a server is asked to receive at a time."""

    def __call__(self, weights: Weights) -> None:
        """Send the weights. Raises `WeightSyncError` if a server does not join, or refuses the weights."""
        with ThreadPoolExecutor(1) as asking, self.group.rendezvous() as members:
            servers = range(1, self.group.size)
            requests = RequestSender(members, receivers=servers, timeout=self.group.timeout)
            with self._led(1 + self.workers * len(servers), asking, requests) as group:
                device = "cuda" if self.backend == "nccl" else "cpu"
                for bucket in buckets(weights, self.dtype, self.bucket_bytes, device=device):
                    infos = [weight_info(name, tensor) for name, tensor in bucket.items()]
                    content = {
                        "names": [info.name for info in infos],
                        "dtypes": [info.dtype for info in infos],
                        "shapes": [list(info.shape) for info in infos],
                    }
                    taking = asking.submit(requests.send, "update", content)
                    for tensor in bucket.values():
                        _until(dist.broadcast(tensor, src=0, group=group, async_op=True), taking)
                    taking.result()
                requests.send(END, {})

    @contextmanager
    def _led(self, size: int, asking: ThreadPoolExecutor, requests: RequestSender) -> Iterator[dist.ProcessGroup]:
        """The process group of this process, rank 0, and the servers' workers, once all have joined."""
        host, port = free_address(self.group.host)
        patience = timedelta(seconds=min(_CONNECT_SECONDS, self.group.timeout))
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=patience)
        name = self.group.name
        where = {"master_address": host, "master_port": port, "world_size": size, "backend": self.backend}
        coming = asking.submit(requests.send, "init", {**where, "group_name": name})
        making = _run_in_background(lambda: _group(self.backend, store, name, size, patience))
        futures: list[Future[Any]] = [coming, making]
        wait(futures, return_when=FIRST_EXCEPTION)
        if coming.done():
            coming.result()  # raised first: a server that does not join is the reason why the group is incomplete
        group = making.result()
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def _group(backend: str, store: Store, name: str, size: int, patience: timedelta) -> dist.ProcessGroup:
    """Rank 0 of a group beside the learner's default one, with the keys that SGLang's workers expect in the store."""
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        size,
        0,
        [],
        c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]  # a NewType that older versions of torch do not have
        timeout=patience,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _run_in_background(call: Callable[[], T]) -> Future[T]:
    """Runs a call, which ends by its own deadline, in a daemon thread. Returns the future of its result."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is raised to the caller that asks for the result
            future.set_exception(error)

    Thread(target=work, name="update-group", daemon=True).start()
    return future


def _until(sending: dist.Work | None, taking: Future[None]) -> None:
    """Wait until a broadcast is done. Raises the error of `taking` if the servers do not take it."""
    assert sending is not None, "the learner is in the group"
    while not sending.is_completed():
        if taking.done():
            taking.result()
            break
        try:
            taking.result(_POLL_SECONDS)
        except TimeoutError:
            continue
    sending.wait()
