"""Objectives of learners: cross entropy of messages, Bradley-Terry on pairs, the critic's regression on returns, and
those of preference runs: losses of pairs and rankings, added up, and of single answers, and what is measured of them.

In a preference run, an item of K answers, two in a pair, is K neighbouring rows of a batch, from the best answer to the
worst, which stay in one micro-batch. Rows without a selected token fill shorter rankings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from skyrl.algorithms.critic import value_is_clipped, value_loss
from skyrl.algorithms.preferences import (
    PAIR_LOSSES,
    PairLoss,
    Pairs,
    PairSettings,
    kto,
    matched,
    plackett_luce,
    policy_weights,
)
from skyrl.algorithms.reductions import token_mean
from skyrl.batch import RowTensors, TrainingBatch
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
        # each number once for both rows of its pair; pairs without selected tokens, which fill up a rank, are left out
        shape = batch.loss_mask.shape
        of_rows = {name: item.repeat_interleave(2)[:, None].expand(shape) for name, item in numbers.items()}
        return loss, {"loss": loss.detach()}, {name: batch.pick(item) for name, item in of_rows.items()}


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


_AOT, _AOT_UNPAIRED = "aot", "aot_unpaired"


@attrs.frozen(kw_only=True)
class PreferenceObjective(Objective):
    """sum_k w_k mean over items of loss_k, with the negative log-likelihood of the best answers as `sft`. A loss of
    pairs is the mean over all pairs of an item (InstructGPT, arXiv:2203.02155, eq. 1).

    Every mean is over the whole batch. `ref_logprobs` of the batch are those of the reference; without them they count
    as 0. Losses that sort the batch read `old_logprobs`, the policy's own before the update.
    """

    losses: tuple[tuple[str, float], ...]
    """Name and weight of each loss."""

    settings: PairSettings
    own: Mapping[str, PairLoss] = attrs.field(factory=dict)
    """The user's own losses of pairs, by their names."""

    answers: int = 2
    """Rows of an item."""

    ld_alpha: float | None = None
    """Weight of the tokens of an answer beyond the length of the shorter one of its pair. None: 1."""

    averages: bool = False
    """Whether the reward of an answer is a mean over its tokens."""

    weighted: bool = False
    """Whether losses of pairs are weighted by the policy's probability of them (`policy_weights`)."""

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The share of each token in the mean over all tokens of best answers; for losses that sort the batch, what
        each answer is compared with.
        """
        best = batch.loss_mask & (torch.arange(len(batch)) % self.answers == 0).unsqueeze(1)
        batch = batch.with_fields(loss_weights=best.float() / best.sum().clamp(min=1))
        names = {name for name, _ in self.losses}
        if names.isdisjoint((_AOT, _AOT_UNPAIRED)):
            return batch
        assert batch.old_logprobs is not None
        pairs = self._pairs(batch.old_logprobs, batch)
        reference = pairs.ref_chosen - pairs.ref_rejected
        partners = {
            _AOT: (matched(pairs.chosen - pairs.rejected, reference), torch.zeros_like(reference)),
            _AOT_UNPAIRED: (matched(pairs.a, pairs.b), matched(pairs.b, pairs.a)),
        }
        ones = torch.ones(len(batch), dtype=torch.long)
        return batch.carrying(
            **{
                name: RowTensors(values=torch.stack(sides, dim=1).flatten(), counts=ones)
                for name, sides in partners.items()
                if name in names
            }
        )

    def __call__(
        self, logprobs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss of one micro-batch (a scalar with gradient), and its parts of the loss and of the measurements of the
        whole batch. `logprobs` (B, L), 0 outside of the answers. `entropy` (B, L) is the collision entropy of each
        token, where pairs are weighted; without it, as in evaluation, they are not.
        """
        assert batch.loss_weights is not None and batch.row_weights is not None
        pairs, shares = self._pairs(logprobs, batch), self._shares(batch)
        weighed = shares
        if self.weighted and entropy is not None:
            evenness = torch.where(batch.loss_mask, logprobs.detach() + entropy, 0.0).sum(1)
            means = evenness / batch.loss_mask.sum(1).clamp(min=1)  # of log p - log sum p^2, over tokens
            weighed = shares * policy_weights(torch.stack(self._sides(means), dim=1))
        loss = logprobs.new_zeros(())
        for name, weight in self.losses:
            match name:
                case "sft":
                    loss = loss - weight * (logprobs * batch.loss_weights).sum()
                case "plackett_luce":
                    ratios = logprobs if batch.ref_logprobs is None else logprobs - batch.ref_logprobs
                    rewards = self.settings.beta * torch.where(batch.loss_mask, ratios, 0.0).sum(1)
                    rankings = plackett_luce(self._group_by_item(rewards), self._group_by_item(batch.loss_mask.any(1)))
                    of_items = self._group_by_item(batch.row_weights).sum(1)
                    loss = loss + weight * (rankings * of_items).sum()
                case _:
                    of_pairs = self.own.get(name) or PAIR_LOSSES[name]
                    loss = loss + weight * (of_pairs(pairs, self.settings) * weighed).sum()
        parts = {name: (numbers * shares).sum() for name, numbers in self._measured(pairs, logprobs, batch).items()}
        if self.weighted and entropy is not None:
            parts["weight"] = weighed.sum()
        return loss, {"loss": loss.detach(), **parts}, {}

    @torch.no_grad()
    def _measured(self, pairs: Pairs, logprobs: Tensor, batch: TrainingBatch) -> dict[str, Tensor]:
        """Name -> (pairs,): rewards of both answers, their order and distance, log-probabilities, and KL(pi_ref || pi)
        per token, estimated as if the reference had drawn the answers (Schulman's k3).
        """
        a, b = (pairs.mean_chosen, pairs.mean_rejected) if self.averages else (pairs.a, pairs.b)
        chosen, rejected = self.settings.beta * a, self.settings.beta * b
        numbers = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logprob": pairs.chosen,
            "rejected_logprob": pairs.rejected,
        }
        if batch.ref_logprobs is None:
            return numbers
        ratios = torch.where(batch.loss_mask, logprobs - batch.ref_logprobs, 0.0)
        tokens = pairs.chosen_tokens + pairs.rejected_tokens
        divergence = sum(self._sides((ratios.exp() - 1 - ratios).sum(1)))
        return numbers | {"kl": divergence / tokens.clamp(min=1)}

    def _pairs(self, logprobs: Tensor, batch: TrainingBatch) -> Pairs:
        """Every pair of answers of an item, item by item."""
        masks = self._sides(batch.loss_mask)
        chosen_tokens, rejected_tokens = (mask.sum(1) for mask in masks)
        shorter = torch.minimum(chosen_tokens, rejected_tokens).unsqueeze(1)

        def sums(values: Tensor) -> list[Tensor]:
            totals = []
            for side, mask in zip(self._sides(values), masks, strict=True):
                weights = mask.float()
                if self.ld_alpha is not None:
                    weights = torch.where(mask.cumsum(1) > shorter, self.ld_alpha * weights, weights)
                totals.append((side * weights).sum(1))
            return totals

        chosen, rejected = sums(logprobs)
        ref_chosen, ref_rejected = sums(
            torch.zeros_like(logprobs) if batch.ref_logprobs is None else batch.ref_logprobs
        )
        extras: dict[str, Any] = {
            name: self._sides(batch.extras[name].values) for name in (_AOT, _AOT_UNPAIRED) if name in batch.extras
        }
        return Pairs(
            chosen=chosen,
            rejected=rejected,
            ref_chosen=ref_chosen,
            ref_rejected=ref_rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            aot=extras[_AOT][0] if _AOT in extras else None,
            aot_chosen=extras[_AOT_UNPAIRED][0] if _AOT_UNPAIRED in extras else None,
            aot_rejected=extras[_AOT_UNPAIRED][1] if _AOT_UNPAIRED in extras else None,
        )

    def _shares(self, batch: TrainingBatch) -> Tensor:
        """(pairs,): share of each pair in a mean over items; 0 for pairs with a row that only fills a ranking."""
        assert batch.row_weights is not None
        of_items = self._group_by_item(batch.row_weights).sum(1)
        if self.answers == 2:
            return of_items
        exist = self._group_by_item(batch.loss_mask.any(1))
        _, worse = self._pair_indices(exist)
        both = exist[:, worse].float()
        return (of_items.unsqueeze(1) * both / both.sum(1, keepdim=True).clamp(min=1)).flatten()

    def _sides(self, values: Tensor) -> list[Tensor]:
        """(B, ...) -> (pairs, ...) of the better and of the worse answers of all pairs."""
        items = self._group_by_item(values)
        return [items[:, indices].flatten(0, 1) for indices in self._pair_indices(values)]

    def _pair_indices(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Places in an item of the better and of the worse answer of each pair."""
        better, worse = torch.triu_indices(self.answers, self.answers, 1, device=values.device)
        return better, worse

    def _group_by_item(self, values: Tensor) -> Tensor:
        """(B, ...) -> (B / K, K, ...)."""
        if len(values) % self.answers:
            raise ValueError(f"{len(values)} rows are not whole items of {self.answers}")
        items: Tensor = values.unflatten(0, (-1, self.answers))
        return items


@attrs.frozen(kw_only=True)
class LabelObjective(Objective):
    """mean over answers of the loss of KTO. Rows carry `label` and, for KTO's z, `baseline`, without which it is 0.
    `ref_logprobs` are those of the reference; without them they count as 0.
    """

    beta: float
    desirable_weight: float
    undesirable_weight: float

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The share of each row among the good or the bad answers, for means of either."""
        labels = batch.extras["label"]
        counts = torch.stack([(labels.values == label).sum() for label in (0, 1)]).clamp(min=1)
        share = RowTensors(values=1 / counts[labels.values.long()], counts=labels.counts)
        return batch.with_fields(loss_weights=batch.loss_mask.float()).carrying(label_share=share)

    def __call__(
        self, logprobs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss of one micro-batch (a scalar with gradient), and its parts of the loss and of the measurements of the
        whole batch. `logprobs` (B, L), 0 outside of the answers. `entropy` is ignored.
        """
        assert batch.row_weights is not None
        labels, shares = batch.extras["label"].values, batch.row_weights
        answers = logprobs.sum(1)
        ratios = answers if batch.ref_logprobs is None else answers - batch.ref_logprobs.sum(1)
        baseline = batch.extras["baseline"].values if "baseline" in batch.extras else torch.zeros_like(ratios)
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        loss = (kto(ratios, labels, baseline, beta=self.beta, **weights) * shares).sum()
        rewards = self.beta * ratios.detach()
        of_label = torch.where(shares > 0, batch.extras["label_share"].values, 0.0)
        good, bad = of_label * labels, of_label * (1 - labels)
        parts = {
            "loss": loss.detach(),
            "accuracy": (((rewards > 0) == (labels > 0)) * shares).sum(),
            "margin": (rewards * (good - bad)).sum(),
            "chosen_reward": (rewards * good).sum(),
            "rejected_reward": (rewards * bad).sum(),
            "chosen_logprob": (answers.detach() * good).sum(),
            "rejected_logprob": (answers.detach() * bad).sum(),
            "baseline": (baseline * shares).sum(),
        }
        return loss, parts, {}
