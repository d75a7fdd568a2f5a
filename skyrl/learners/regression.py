"""The critic's objective: the clipped squared distance between its values and the returns."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.values import value_is_clipped, value_loss
from skyrl.batch import TrainingBatch
from skyrl.learners.workers.learning_worker import Objective


@attrs.frozen(kw_only=True)
class ReturnRegression(Objective):
    """The critic's objective. Every token of a mini-batch counts the same."""

    value_clip: float | None
    """Clip range, see `trainer.algorithm.value_clip`. None: plain squared error."""

    def __call__(
        self, values: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss of one micro-batch (a scalar with gradient), its parts, sums over tokens, and for each selected token
        whether its value was clipped.

        `values` (B, L) are the current critic's; the batch holds `returns`, and with clipping the old `values`.
        `entropy` is ignored.
        """
        assert batch.returns is not None and batch.loss_weights is not None
        losses = value_loss(values, batch.values, batch.returns, clip=self.value_clip)
        loss = (torch.where(batch.loss_weights != 0, losses, 0.0) * batch.loss_weights).sum()
        clipped = value_is_clipped(values.detach(), batch.values, batch.returns, clip=self.value_clip)
        return loss, {"critic_loss": loss.detach()}, {"values_clipfrac": batch.pick(clipped)}
