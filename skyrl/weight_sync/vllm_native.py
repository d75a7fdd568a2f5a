"""The learner's end of vLLM's own weight transfer: NCCL between GPUs, CUDA IPC on shared ones.

vLLM's trainer engine decides what its workers have to do; `_Workers` passes that on to them, and compares digests
before the update is finished. Digests are computed on the GPU: the weights do not leave it.
"""

from __future__ import annotations

import importlib
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from skyrl.weight_receiver.checksums import Digests, is_hashed_at_once
from skyrl.weight_receiver.incoming_weights import WeightInfo
from skyrl.weight_receiver.transfer_group import END, RequestSender, TransferGroup
from skyrl.weight_receiver.vllm_native import plain_handle

Weights = Iterator[tuple[str, Tensor]]

_TRANSFER = "vllm.distributed.weight_transfer"


@frozen(kw_only=True)
class VLLMNativeSender:
    """Sends weights through vLLM's transfer `backend`; `incoming_weights.VLLMNativeWeights` is the other end.

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
        with self.group.with_rank_offset(rank).rendezvous() as store:
            receivers = range(self.senders, self.group.size)
            workers = _Workers(RequestSender(store, receivers=receivers, timeout=self.group.timeout))
            factory = importlib.import_module(f"{_TRANSFER}.factory").WeightTransferTrainerFactory
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
            module = importlib.import_module(f"{_TRANSFER}.ipc_engine")
            total = sum(math.prod(info.shape) * _dtype(info).itemsize for info in self.weights)
            size = min(self.bucket_bytes, total)
            return module.IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
        host, port = free_address(self.group.host)
        return INIT_INFOS[self.backend](rank=rank, master_address=host, master_port=port, world_size=self.group.size)


def _nccl(**fields: object) -> object:
    return importlib.import_module(f"{_TRANSFER}.nccl_engine").NCCLTrainerInitInfo(**fields)


INIT_INFOS: dict[str, Callable[..., Any]] = {"nccl": _nccl}
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
    base = importlib.import_module(f"{_TRANSFER}.base")

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
