"""Data parallelism, common to one process, FSDP2 and ZeRO: every rank runs the whole model over its own rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

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
