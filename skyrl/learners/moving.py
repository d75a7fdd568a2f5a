"""Moving tensors between a device and host memory, counted: a GPU is shared in time by those who leave it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

HOST = torch.device("cpu")


class DeviceMover:
    """Moves what is elsewhere. Another mover may be put in its place, to see what is moved, and when."""

    def move(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, int]:
        """The tensor, of any shape, on `device`, and the bytes moved on this rank: 0 where it is there already."""
        if tensor.device == device:
            return tensor, 0
        return tensor.to(device), local_bytes(tensor)


def local_bytes(tensor: Tensor) -> int:
    """Bytes that this rank holds of a tensor of any shape: of its shard, where it is distributed."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
