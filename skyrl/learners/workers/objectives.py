"""Objectives of learners: cross entropy of messages, Bradley-Terry on pairs, and the critic's regression on returns."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from skyrl.algorithms.critic import value_is_clipped, value_loss
from skyrl.algorithms.reductions import token_mean
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


@attrs.frozen(kw_only=True)
class CrossEntropy(Objective):
    """-sum_t w_t log pi(token t) / sum_t w_t over the whole batch, where w_t is the weight of token t: 0 or 1 by the
    mask, unless the data set other weights. A token's share does not depend on the length of its row.
    """

    coef: float = 1.0
    """Factor of the gradient; the loss that is reported is without it."""

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The share of each token in the loss of the batch."""
        if batch.token_weights is not None:
            return batch.with_fields(loss_weights=batch.token_weights / batch.token_weights.sum())
        return batch.with_fields(loss_weights=token_mean(batch.loss_mask))

    def __call__(
        self, logprobs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss of one micro-batch (a scalar with gradient), and the same number as its part of the whole, in nats.

        `logprobs` (B, L). `entropy` is ignored.
        """
        assert batch.loss_weights is not None
        loss = -(logprobs * batch.loss_weights).sum()
        return self.coef * loss, {"loss": loss.detach()}, {}


@attrs.frozen(kw_only=True)
class BradleyTerry(Objective):
    """-mean over pairs of log sigmoid(s_chosen - s_rejected - m).

    Bradley and Terry 1952, as in arXiv:2203.02155, eq. 1. m is the margin of the pair, 0 or more (Llama 2,
    arXiv:2307.09288, eq. 2), which is stored as the reward of the chosen row.

    Rows 2i and 2i + 1 are the chosen and the rejected chat of a pair, and stay in one micro-batch. One token of each
    row is selected, and the value at its position is the score of all tokens before it.
    """

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The share of each row's pair in the loss of the batch, at the row's selected token."""
        return batch.with_fields(loss_weights=batch.loss_mask.float() * (2 / len(batch)))

    def __call__(
        self, values: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss of one micro-batch, its part of the whole, and for each pair the accuracy, the margin and both scores.

        `values` (B, L), 0 outside of the selected tokens. `entropy` is ignored.
        """
        assert batch.loss_weights is not None
        chosen, rejected = pair_scores(values)
        losses = preference_loss(chosen, rejected, pair_margins(batch))
        loss = (losses * batch.loss_weights.sum(1)[0::2]).sum()
        margins = (chosen - rejected).detach()
        numbers = {
            "accuracy": (margins > 0).float(),
            "margin": margins,
            "chosen_score": chosen.detach(),
            "rejected_score": rejected.detach(),
        }
        return loss, {"loss": loss.detach()}, {name: _spread_pairs(number, batch) for name, number in numbers.items()}


def _spread_pairs(numbers: Tensor, batch: TrainingBatch) -> Tensor:
    """(B / 2,) -> (N,): the number of each pair, once for each of its rows. Pairs without selected tokens, which only
    fill up a rank, are left out.
    """
    return batch.pick(numbers.repeat_interleave(2)[:, None].expand(batch.loss_mask.shape))


def pair_scores(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (B / 2,) of the chosen and of the rejected chats, from values (B, L) with one nonzero entry per row."""
    if len(values) % 2:
        raise ValueError(f"{len(values)} rows are not whole pairs")
    scores = values.sum(1)
    return scores[0::2], scores[1::2]


def pair_margins(batch: TrainingBatch) -> Tensor:
    """(B / 2,): by how much the chosen row of each pair should score more."""
    return batch.rewards.sum(1)[0::2]


def preference_loss(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """The loss of each pair, (N,) in nats."""
    losses: Tensor = -logsigmoid(chosen - rejected - margins)
    return losses
