"""Moves tensors between a device and host memory: whole models, which take turns on a GPU, with the bytes counted; and
until backward the activations that gradient checkpointing keeps, the inputs of layers.

Copies of activations to the host overlap with the computation, on a separate stream; the copy back is queued when
backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

HOST = torch.device("cpu")


class DeviceMover:
    """Moves tensors that are not on the target device yet. Another mover may replace it, to observe the moves.

    Copies between a GPU and the host are asynchronous, through page-locked memory, in order; `settle` waits for all of
    them.
    """

    def is_host(self, device: torch.device) -> bool:
        """Whether `device` uses host memory, so that nothing has to move."""
        return device == HOST

    def move(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, int]:
        """The tensor, of any shape, on `device`, and the bytes moved on this rank: 0 if it was there already."""
        if tensor.device == device:
            return tensor, 0
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # this rank's part
        return tensor.to(device, non_blocking=True), own.nbytes  # on the host, torch takes page-locked memory

    def settle(self, source: torch.device) -> None:
        """Wait for all moves away from `source`, and release the memory there for other processes.

        Moves to a GPU need no wait: later work on the GPU is queued behind the copies.
        """
        if source.type == "cuda":
            torch.cuda.current_stream(source).synchronize()
            torch.cuda.empty_cache()


class BufferMemory:
    """The flat buffers behind parameters and gradients under Megatron. Their memory can be freed and restored; views
    stay valid.
    """

    def __init__(self, ddp: Any) -> None:
        """`ddp` is Megatron-core's `DistributedDataParallel`."""
        self.all: tuple[Any, ...] = (*ddp.buffers, *ddp.expert_parallel_buffers)
        self._on_host: dict[int, Tensor] = {}

    def leave(self) -> int:
        """Move weights to the host and drop gradients. Returns the bytes freed."""
        freed = 0
        for buffer in self.all:
            for tensor, kept in ((buffer.param_data, True), (buffer.grad_data, False)):
                if tensor is None or not tensor.untyped_storage().size():
                    continue
                if kept:
                    self._on_host[id(tensor)] = tensor.to(HOST, copy=True)
                freed += tensor.nbytes
                tensor.untyped_storage().resize_(0)
        return freed

    def come_back(self) -> int:
        """Restore weights from the host, and gradients as zeros. Returns the bytes allocated."""
        allocated = 0
        for buffer in self.all:
            for tensor in (buffer.param_data, buffer.grad_data):
                if tensor is None or tensor.untyped_storage().size():
                    continue
                tensor.untyped_storage().resize_(tensor.nbytes)
                kept = self._on_host.pop(id(tensor), None)
                tensor.zero_() if kept is None else tensor.copy_(kept)
                allocated += tensor.nbytes
        return allocated


def move_optimizer(outer: Any, device: torch.device, mover: DeviceMover) -> int:
    """Move the state of Megatron-core's optimizer and its master weights to `device`. Returns the bytes moved."""
    moved = 0
    for inner in outer.chained_optimizers:
        for group in getattr(inner, "shard_fp32_from_float16_groups", ()):
            for main in group:
                main.data, count = mover.move(main.data, device)
                moved += count
        for slots in inner.optimizer.state.values():
            for slot, value in slots.items():
                if isinstance(value, Tensor) and slot != "step":
                    slots[slot], count = mover.move(value, device)
                    moved += count
    return moved


SMALLEST = 2**20
"""Bytes below which an activation stays on its device, because a copy is not worth its time."""


class HostActivations:
    """Sends the inputs of checkpointed layers to page-locked host memory, and fetches them for backward."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def attach(self, model: nn.Module) -> None:
        """Offload from now on the inputs that the checkpointed layers of `model` keep."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                layer: Any = module
                layer._gradient_checkpointing_func = partial(self._around, layer._gradient_checkpointing_func)

    def wants(self, tensor: Tensor) -> bool:
        """Whether the tensor is an activation on a GPU and large enough to offload. Weights stay on the GPU anyway."""
        return tensor.device.type == "cuda" and not tensor.is_leaf and tensor.nbytes >= SMALLEST

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the host, of the same shape; it is complete once the device's copy stream has reached it."""
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy = tensor.to("cpu", non_blocking=True)  # torch takes page-locked memory
        tensor.record_stream(stream)  # its memory is not reused before the copy is made
        return copy

    def fetch(self, copy: Tensor, device: torch.device) -> Tensor:
        """The tensor, of the same shape, back on the device; the host does not wait for the copy."""
        torch.cuda.current_stream(device).wait_stream(self._streams[device])
        return copy.to(device, non_blocking=True)

    def _around(self, checkpointed: Callable[..., object], *args: object, **kwargs: object) -> object:
        with saved_tensors_hooks(
            lambda tensor: (self.send(tensor), tensor.device) if self.wants(tensor) else tensor,
            lambda kept: kept if isinstance(kept, Tensor) else self.fetch(*kept),
        ):
            return checkpointed(*args, **kwargs)
