"""Moves tensors between a device and host memory and counts bytes, so that models can take turns on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
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
        return tensor.to(device, non_blocking=True), local_bytes(tensor)  # on the host, torch takes page-locked memory

    def settle(self, source: torch.device) -> None:
        """Wait for all moves away from `source`, and release the memory there for other processes.

        Moves to a GPU need no wait: later work on the GPU is queued behind the copies.
        """
        if source.type == "cuda":
            torch.cuda.current_stream(source).synchronize()
            torch.cuda.empty_cache()


def local_bytes(tensor: Tensor) -> int:
    """Bytes that this rank holds of a tensor of any shape; of its shard if the tensor is distributed."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
