"""Offloading of a model under Megatron, to free its GPU: flat buffers, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from skyrl.learners.offloading import HOST, DeviceMover


class BufferMemory:
    """The flat buffers behind parameters and gradients. Their memory can be freed and restored; views stay valid."""

    def __init__(self, ddp: Any) -> None:
        """`ddp` is Megatron-core's `DistributedDataParallel`."""
        self._ddp = ddp
        self._on_host: dict[int, Tensor] = {}

    def leave(self) -> int:
        """Move weights to the host and drop gradients. Returns the bytes freed."""
        freed = 0
        for buffer in self._buffers():
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
        for buffer in self._buffers():
            for tensor in (buffer.param_data, buffer.grad_data):
                if tensor is None or tensor.untyped_storage().size():
                    continue
                tensor.untyped_storage().resize_(tensor.nbytes)
                kept = self._on_host.pop(id(tensor), None)
                tensor.zero_() if kept is None else tensor.copy_(kept)
                allocated += tensor.nbytes
        return allocated

    def _buffers(self) -> Iterator[Any]:
        yield from self._ddp.buffers
        yield from self._ddp.expert_parallel_buffers


def move_optimizer(outer: Any, device: torch.device, mover: DeviceMover) -> int:
    """Move the optimizer's state and its master weights to `device`. Returns the bytes moved."""
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
