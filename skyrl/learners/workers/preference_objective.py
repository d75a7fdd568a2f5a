"""Objectives of preference runs: losses of pairs and rankings, added up, and of single answers, and what is measured of
them.

An item of K answers, two in a pair, is K neighbouring rows of a batch, from the best answer to the worst, which stay in
one micro-batch. Rows without a selected token fill shorter rankings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

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
from skyrl.batch import RowTensors, TrainingBatch
from skyrl.learners.workers.learning_worker import Objective

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
            weighed = shares * self._policy_weights(logprobs.detach() + entropy, batch)
        loss = logprobs.new_zeros(())
        for name, weight in self.losses:
            match name:
                case "sft":
                    loss = loss - weight * (logprobs * batch.loss_weights).sum()
                case "plackett_luce":
                    loss = loss + weight * self._ranking_loss(logprobs, batch)
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

    def _ranking_loss(self, logprobs: Tensor, batch: TrainingBatch) -> Tensor:
        """The mean over items of the loss of whole rankings, a scalar with gradient."""
        assert batch.row_weights is not None
        ratios = logprobs if batch.ref_logprobs is None else logprobs - batch.ref_logprobs
        ratios = torch.where(batch.loss_mask, ratios, 0.0).sum(1)
        losses = plackett_luce(
            self.settings.beta * self._group_by_item(ratios), self._group_by_item(batch.loss_mask.any(1))
        )
        return (losses * self._group_by_item(batch.row_weights).sum(1)).sum()

    def _policy_weights(self, evenness: Tensor, batch: TrainingBatch) -> Tensor:
        """(pairs,), from log p - log sum p^2 of each token (B, L)."""
        tokens = batch.loss_mask.sum(1).clamp(min=1)
        means = torch.where(batch.loss_mask, evenness, 0.0).sum(1) / tokens
        return policy_weights(torch.stack(self._sides(means), dim=1))

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
