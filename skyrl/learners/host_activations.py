"""Activations that wait for backward in host memory: the inputs of layers, which gradient checkpointing keeps.

A copy to the host runs beside the computation, on a stream of its own; the copy back is queued where backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 2**20
"""Bytes below which a tensor stays where it is: a copy would take longer than it saves."""

Kept = Tensor | tuple[Tensor, torch.device]
"""A tensor that stayed, or its copy on the host and the device that it belongs to."""


class HostActivations:
    """Sends the inputs of checkpointed layers to page-locked host memory, and fetches them for backward."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def attach(self, model: nn.Module) -> None:
        """From now on, what the checkpointed layers of `model` keep waits on the host."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                layer: Any = module
                layer._gradient_checkpointing_func = partial(self._around, layer._gradient_checkpointing_func)

    def wants(self, tensor: Tensor) -> bool:
        """Is it an activation on a GPU that is worth the way? Weights are kept anyway."""
        return tensor.device.type == "cuda" and not tensor.is_leaf and tensor.nbytes >= SMALLEST

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the host, of the same shape, which is complete once the device's stream for it has come so far."""
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy = tensor.to("cpu", non_blocking=True)  # torch takes page-locked memory
        tensor.record_stream(stream)  # its memory is not reused before the copy is made
        return copy

    def fetch(self, copy: Tensor, device: torch.device) -> Tensor:
        """The tensor, of the same shape, on the device again; the host does not wait."""
        torch.cuda.current_stream(device).wait_stream(self._streams[device])
        return copy.to(device, non_blocking=True)

    def _around(self, checkpointed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpointed(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Kept:
        return (self.send(tensor), tensor.device) if self.wants(tensor) else tensor

    def _unpack(self, kept: Kept) -> Tensor:
        return kept if isinstance(kept, Tensor) else self.fetch(*kept)
