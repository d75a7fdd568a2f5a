"""Objectives of preference runs: losses of pairs, added up, and of single answers, and what is measured of them.

For pairs, rows 2i and 2i + 1 of a batch are the chosen and the rejected answer of a pair, and stay in one micro-batch.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.preferences import PAIR_LOSSES, Pairs, PairSettings, kto, matched
from skyrl.batch import RowTensors, TrainingBatch
from skyrl.learners.workers.learning_worker import Objective

_AOT, _AOT_UNPAIRED = "aot", "aot_unpaired"


@attrs.frozen(kw_only=True)
class PreferenceObjective(Objective):
    """sum_k w_k mean over pairs of loss_k, with the negative log-likelihood of the chosen answers as `sft`.

    Every mean is over the whole batch. `ref_logprobs` of the batch are those of the reference; without them they count
    as 0. Losses that sort the batch read `old_logprobs`, the policy's own before the update.
    """

    losses: tuple[tuple[str, float], ...]
    """Name and weight of each loss."""

    settings: PairSettings
    ld_alpha: float | None = None
    """Weight of the tokens of an answer beyond the length of the shorter one of its pair. None: 1."""

    averages: bool = False
    """Whether the reward of an answer is a mean over its tokens."""

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The share of each token in the mean over all tokens of chosen answers; for losses that sort the batch, what
        each answer is compared with.
        """
        chosen = batch.loss_mask & (torch.arange(len(batch)) % 2 == 0).unsqueeze(1)
        batch = batch.given(loss_weights=chosen.float() / chosen.sum().clamp(min=1))
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
        whole batch. `logprobs` (B, L), 0 outside of the answers. `entropy` is ignored.
        """
        assert batch.loss_weights is not None and batch.row_weights is not None
        pairs, shares = self._pairs(logprobs, batch), 2 * batch.row_weights[0::2]
        loss = logprobs.new_zeros(())
        for name, weight in self.losses:
            if name == "sft":
                loss = loss - weight * (logprobs * batch.loss_weights).sum()
            else:
                loss = loss + weight * (PAIR_LOSSES[name](pairs, self.settings) * shares).sum()
        parts = {name: (numbers * shares).sum() for name, numbers in self._measured(pairs, logprobs, batch).items()}
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
        return numbers | {"kl": _of_pairs((ratios.exp() - 1 - ratios).sum(1)).sum(1) / tokens.clamp(min=1)}

    def _pairs(self, logprobs: Tensor, batch: TrainingBatch) -> Pairs:
        mask = batch.loss_mask
        tokens = _of_pairs(mask.sum(1))
        weights = mask.float()
        if self.ld_alpha is not None:
            shorter = tokens.amin(1).repeat_interleave(2).unsqueeze(1)
            weights = torch.where(mask.cumsum(1) > shorter, self.ld_alpha * weights, weights)
        chosen, rejected = _of_pairs((logprobs * weights).sum(1)).unbind(1)
        reference = torch.zeros_like(logprobs) if batch.ref_logprobs is None else batch.ref_logprobs
        ref_chosen, ref_rejected = _of_pairs((reference * weights).sum(1)).unbind(1)
        extras: dict[str, Any] = {name: _of_pairs(carried.values) for name, carried in batch.extras.items()}
        return Pairs(
            chosen=chosen,
            rejected=rejected,
            ref_chosen=ref_chosen,
            ref_rejected=ref_rejected,
            chosen_tokens=tokens[:, 0],
            rejected_tokens=tokens[:, 1],
            aot=extras[_AOT][:, 0] if _AOT in extras else None,
            aot_chosen=extras[_AOT_UNPAIRED][:, 0] if _AOT_UNPAIRED in extras else None,
            aot_rejected=extras[_AOT_UNPAIRED][:, 1] if _AOT_UNPAIRED in extras else None,
        )


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
        return batch.given(loss_weights=batch.loss_mask.float()).carrying(label_share=share)

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


def _of_pairs(numbers: Tensor) -> Tensor:
    """(B,) -> (B / 2, 2): the numbers of the two rows of each pair."""
    if len(numbers) % 2:
        raise ValueError(f"{len(numbers)} rows are not whole pairs")
    return numbers.view(-1, 2)
