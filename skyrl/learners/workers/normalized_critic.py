"""A critic that learns normalized returns and reports values in the units of the returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from skyrl.algorithms.critic import ReturnScale, masked
from skyrl.batch import TrainingBatch
from skyrl.checkpoint.shards import TensorSource
from skyrl.learners.rank_metrics import Metrics
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.roles import CriticWorker

VALUES = "critic_values_"
"""Prefix of the metrics that are values of the critic."""


class NormalizedCritic(LearnerGroup[CriticWorker]):
    """All ranks of a critic. Its model predicts (return - mean) / std with running moments of the returns, which are
    part of its state.
    """

    scale = ReturnScale()
    """Moments of the returns so far."""

    _scored_by = scale
    """Moments with which the values of the current batch were computed, to recover the model's own predictions, which
    `value_clip` compares."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) float32: the values of the selected tokens in the units of the returns, 0 elsewhere."""
        self._scored_by = self.scale
        return masked(self.scale.restored(await super().score(batch)), batch.loss_mask)

    async def forward_backward(self, batch: TrainingBatch, objective: Objective) -> Metrics:
        """Add the gradient towards the normalized returns of the batch, which the moments already include."""
        assert batch.returns is not None
        self.scale = self.scale.updated(batch.returns[batch.loss_mask])
        targets = masked(self.scale.normalized(batch.returns), batch.loss_mask)
        old = None if batch.values is None else masked(self._scored_by.normalized(batch.values), batch.loss_mask)
        metrics = await super().forward_backward(batch.with_fields(returns=targets, values=old), objective)
        return self._denormalize_metrics(metrics) | {"return_mean": self.scale.mean, "return_std": self.scale.std}

    async def stage(self) -> tuple[dict[str, Any], int]:
        numbers, size = await super().stage()
        return {**numbers, "return_scale": attrs.asdict(self.scale)}, size

    async def load_state(self, source: TensorSource, numbers: Mapping[str, Any]) -> None:
        """Load a staged state. A critic that was stored without moments starts with new ones."""
        await super().load_state(source, numbers)
        stored = numbers.get("return_scale")
        self.scale = self._scored_by = ReturnScale() if stored is None else ReturnScale.of(stored)

    def _denormalize_metrics(self, metrics: Metrics) -> Metrics:
        spread = {name: value for name, value in metrics.items() if name.startswith(VALUES)}
        restored = {name: value * self.scale.std + self.scale.mean for name, value in spread.items()}
        if f"{VALUES}std" in spread:
            restored[f"{VALUES}std"] = spread[f"{VALUES}std"] * self.scale.std
        return metrics | restored
