"""The interface of a model that scores batches."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from skyrl.batch import TrainingBatch


class Scorer(Protocol):
    """A model that gives log-probabilities."""

    async def score(self, batch: TrainingBatch, /) -> Tensor:
        """(B, L) log-probabilities of the sampled tokens, in nats."""
