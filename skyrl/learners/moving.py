"""Moving tensors between a device and host memory, counted: a GPU is shared in time by those who leave it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

HOST = torch.device("cpu")


class DeviceMover:
    """Moves what is elsewhere. Another mover may be put in its place, to see what is moved, and when.

    Copies between a GPU and the host are only begun, in page-locked memory, one behind the other; `settle` waits for
    all of them.
    """

    def is_host(self, device: torch.device) -> bool:
        """Whether what is on `device` is in host memory anyway, so that nothing has to move."""
        return device == HOST

    def move(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, int]:
        """The tensor, of any shape, on `device`, and the bytes moved on this rank: 0 where it is there already."""
        if tensor.device == device:
            return tensor, 0
        return tensor.to(device, non_blocking=True), local_bytes(tensor)  # on the host, torch takes page-locked memory

    def settle(self, source: torch.device) -> None:
        """Returns when what was moved away from `source` has come, and others can have the memory that it took there.

        What comes to a GPU need not be waited for: work on it begins after the copies.
        """
        if source.type == "cuda":
            torch.cuda.current_stream(source).synchronize()
            torch.cuda.empty_cache()


def local_bytes(tensor: Tensor) -> int:
    """Bytes that this rank holds of a tensor of any shape: of its shard, where it is distributed."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
