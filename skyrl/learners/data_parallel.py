"""Data parallelism, common to one process, FSDP2 and ZeRO: every rank runs the whole model over its own rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from skyrl.learners.row_layouts import MicroBatch
from skyrl.learners.strategy import nan_unless_finite

T = TypeVar("T")


class DataParallel(ABC):
    """Runs micro-batches one after the other. Subclasses define how weights are gathered and gradients are reduced."""

    model: Any
    """The module that is called for a forward pass."""

    _device: torch.device

    @abstractmethod
    def computing(self) -> AbstractContextManager[Any]:
        """Context of the forward and backward passes of micro-batches, which sets the type that they compute in."""

    @abstractmethod
    def scoring(self) -> AbstractContextManager[Any]:
        """Context of passes without gradient; it frees gathered weights at its end."""

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of the sum of all ranks' `loss`, a scalar; `last` marks the last micro-batch of a pass."""

    def probe(self, look: Callable[[Any], T]) -> T:
        """`look(model)`, without gradient, in the type of the weights."""
        with self.scoring():
            return look(self.model)

    def forward(self, micro_batches: Sequence[MicroBatch], read: Callable[[Any, MicroBatch], T]) -> list[T]:
        """`read(model, micro_batch)` of each micro-batch, one after the other. See `Strategy.forward`."""
        with self.scoring(), self.computing():
            return [read(self.model, micro.to(self._device)) for micro in micro_batches]

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: Callable[[Any, MicroBatch], T],
        loss_of: Callable[[T, MicroBatch], Tensor],
    ) -> None:
        """Add the gradient of the sum of `loss_of(read(model, micro_batch), micro_batch)`, a scalar, one micro-batch
        after the other. See `Strategy.accumulate`.
        """
        with self.computing():
            for number, micro in enumerate(micro_batches, start=1):
                moved = micro.to(self._device)
                loss = loss_of(read(self.model, moved), moved)
                self.backward(nan_unless_finite(loss), last=number == len(micro_batches))


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A block in which the parameters of `model`, which is not sharded, are copies in `dtype`, dropped at its end.

    Weights, gradients and optimizer state stay in float32. With copies in 16 bits, nothing is converted between two
    matrix products, and the residual stream takes half the memory traffic. FSDP2's mixed precision computes in the same
    way with several ranks.

    Each backward pass in the block adds its gradients to those of the model's own parameters, in their own type. Tied
    parameters share one copy. In its own type, the model stays as it is.
    """
    slots = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and parameter.dtype is not dtype
    ]
    copies = _copies({id(parameter): parameter for _, _, parameter in slots}, dtype)
    try:
        for module, name, parameter in slots:
            module._parameters[name] = copies[id(parameter)]
        yield
    finally:
        for module, name, parameter in slots:
            module._parameters[name] = parameter


def _copies(parameters: dict[int, nn.Parameter], dtype: torch.dtype) -> dict[int, nn.Parameter]:
    """A copy of each parameter, under the same key. All are filled by one operator: a model has hundreds."""
    tensors = [torch.empty_like(item, dtype=dtype, requires_grad=False) for item in parameters.values()]
    if tensors:
        torch._foreach_copy_(tensors, [entry.detach() for entry in parameters.values()])
    copies = {}
    for (key, parameter), tensor in zip(parameters.items(), tensors, strict=True):
        copies[key] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            copies[key].register_post_accumulate_grad_hook(partial(_add_gradient, parameter))
    return copies


def _add_gradient(parameter: nn.Parameter, copy: Tensor) -> None:
    """Move the gradient of a copy to the parameter as soon as it is complete, so that few exist at once in 16 bits."""
    assert copy.grad is not None
    if parameter.grad is None:
        parameter.grad = copy.grad.to(parameter.dtype)
    else:
        parameter.grad.add_(copy.grad)
    copy.grad = None
