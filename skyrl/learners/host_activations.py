"""Offloading of activations to host memory until backward: the inputs of layers, which gradient checkpointing keeps.

Copies to the host overlap with the computation, on a separate stream; the copy back is queued when backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 2**20
"""Bytes below which a tensor stays on its device, because a copy is not worth its time."""

Kept = Tensor | tuple[Tensor, torch.device]
"""A tensor that stayed, or its copy on the host and the device that it belongs to."""


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

    def _around(self, checkpointed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpointed(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Kept:
        return (self.send(tensor), tensor.device) if self.wants(tensor) else tensor

    def _unpack(self, kept: Kept) -> Tensor:
        return kept if isinstance(kept, Tensor) else self.fetch(*kept)
