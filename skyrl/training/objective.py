"""The objective of the policy, built from the configuration: policy loss, correction, KL estimate and token weights."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.kl import KLEstimator, kl_estimate
from skyrl.algorithms.losses import LossInputs, PolicyLoss, measured
from skyrl.algorithms.off_policy import Bounds, OffPolicyCorrection, correct, interpolated_logprobs
from skyrl.algorithms.reductions import (
    mean_of_block_means,
    prompt_mean,
    sequence_mean,
    sequence_sum_by_length,
    token_mean,
)
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.config.derive.algorithm_facts import loss_facts
from skyrl.config.foundation.import_paths import load_builtin
from skyrl.config.foundation.peer_signatures import LOSS_SIGNATURES, peer_signature_of
from skyrl.config.settings.algorithm import LossReduction
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.config.settings.registry import PolicyLossRegistry
from skyrl.training.peer_functions import ReducedLoss, checked_loss, checked_per_token_loss
from skyrl.tree import required
from skyrl.tree.classes import fields_of

LEARNED_PER_MEASURED_ROW = 32
"""For metrics and alarms, one row without an advantage is measured for this many rows that are learned."""


@attrs.frozen(kw_only=True)
class Reduction:
    """Weight of each token in the mini-batch, by `loss_reduction`."""

    name: LossReduction = "token_mean"
    max_seq_len: int | None = None
    """Number of tokens that `seq_mean_token_sum_norm` divides by."""

    micro_batch_rows: int = 1
    """Rows of a micro-batch, used by `token_mean_legacy`."""

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L) weights of the tokens of a mini-batch."""
        match self.name:
            case "token_mean":
                return token_mean(batch.loss_mask)
            case "sequence_mean":
                return answer_mean(batch)
            case "seq_mean_token_sum_norm":
                length = required(self.max_seq_len, "trainer.algorithm.max_seq_len")
                return sequence_sum_by_length(batch.loss_mask, length=length) * (len(batch) / batch.answers)
            case "prompt_mean":
                return prompt_mean(batch.loss_mask, batch.groups)
            case "token_mean_legacy":
                return mean_of_block_means(batch.loss_mask, rows=self.micro_batch_rows)


def answer_mean(batch: TrainingBatch) -> Tensor:
    """(B, L): every answer counts the same, and so does every token in it, whether the answer is one row or several."""
    if batch.trajectories is None:
        return sequence_mean(batch.loss_mask)
    return prompt_mean(batch.loss_mask, batch.trajectories)


def unit_weights(batch: TrainingBatch) -> Tensor:
    """(B, L): weight 1 of every trained token, for a loss whose advantages contain the weights."""
    return batch.loss_mask.float()


@attrs.frozen(kw_only=True)
class PolicyObjective:
    """The objective that one optimizer step of the policy minimizes over a mini-batch.

        sum_t weight_t loss_t
        + kl_loss_coef * mean over answers of mean over tokens of KL(pi || pi_ref)
        - entropy_loss_coef * mean over tokens of the entropy of pi

    `weigh` is called once with the whole mini-batch; the objective is then called with each micro-batch, and their
    losses add up.
    """

    policy_loss: PolicyLoss
    zero_at_zero_advantage: bool = False
    """Whether loss and gradient are exactly 0 at tokens whose advantage is 0."""

    kl_loss_coef: float = 0.0
    """Weight of the KL loss; 0 turns it off, and reference log-probabilities are not read."""

    kl_estimator: KLEstimator = "k3"
    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus; 0 turns it off."""

    distills: bool = False
    """Whether the learner adds the divergence from a teacher to the loss of every token."""

    reduction: Callable[[TrainingBatch], Tensor] = attrs.field(factory=Reduction)
    correction: OffPolicyCorrection = attrs.field(factory=OffPolicyCorrection)

    @property
    def wants_entropy(self) -> bool:
        """Whether the loss needs the gradient of the entropy."""
        return self.entropy_loss_coef != 0

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The mini-batch with the weight of each token filled in, without rows that do not contribute: rows without a
        trained token, or without an advantage if the gradient depends on advantages alone.
        """
        weighed = batch.with_fields(
            loss_weights=self.reduction(batch),
            kl_weights=answer_mean(batch) if self.kl_loss_coef else None,
            entropy_weights=token_mean(batch.loss_mask) if self.wants_entropy else None,
        )
        rows = self._contributing(batch).nonzero().squeeze(1)
        return weighed if len(rows) in (0, len(batch)) else weighed.select(rows)

    def measured_only(self, batch: TrainingBatch) -> tuple[TrainingBatch, float] | None:
        """A sample of the rows that `weigh` leaves out because they have no advantage, weighed, and the number of
        left-out tokens that each of its tokens stands for in metrics. None if there is no such row, or if none
        contributes.

        They take a pass without gradient: with one for `LEARNED_PER_MEASURED_ROW` rows, about 1 % of the update.
        """
        used = self._contributing(batch)
        left_out = (batch.loss_mask.any(1) & ~used).nonzero().squeeze(1)
        count = min(len(left_out), -(-int(used.sum()) // LEARNED_PER_MEASURED_ROW))
        if not count:
            return None
        rows = left_out[(torch.arange(count) * len(left_out) + len(left_out) // 2) // count]  # evenly spaced
        sample = batch.with_fields(loss_weights=torch.zeros(batch.loss_mask.shape)).select(rows)
        return sample, batch.loss_mask[left_out].sum().item() / sample.loss_mask.sum().item()

    def _contributing(self, batch: TrainingBatch) -> Tensor:
        """(B,) bool: rows that the loss and its gradient depend on."""
        used = batch.loss_mask
        all_rows_contribute = self.kl_loss_coef or self.wants_entropy or self.distills
        if not all_rows_contribute and self.zero_at_zero_advantage:
            assert batch.advantages is not None
            used = used & (batch.advantages != 0)
        return used.any(1)

    def __call__(
        self, logprobs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Returns the loss of one micro-batch (a scalar with gradient), its parts as sums to be added over
        micro-batches, and named values per token or sequence, to be averaged over all micro-batches.

        `logprobs` and `entropy` (B, L) are the current policy's; `entropy` is part of the loss only with an entropy
        bonus. If the batch has no old log-probabilities, the current ones are used, without gradient.
        """
        assert batch.advantages is not None and batch.loss_weights is not None
        inputs = LossInputs.selected(
            batch.loss_mask,
            logprobs=logprobs,
            old_logprobs=old_logprobs(logprobs.detach(), batch),
            rollout_logprobs=logprobs.detach() if batch.rollout_logprobs is None else batch.rollout_logprobs,
            advantages=batch.advantages,
            weights=batch.loss_weights,
        )
        losses = self.policy_loss(inputs)
        token_metrics = {name: batch.pick(values) for name, values in measured(self.policy_loss, inputs).items()}
        if self.correction:
            correction = correct(inputs.old_logprobs, inputs.rollout_logprobs, inputs.mask, self.correction)
            losses = torch.where(correction.mask, losses * correction.weights, 0.0)
            token_metrics |= correction.numbers
        loss = _weighted_sum(losses, batch.loss_weights)
        parts = {"policy_loss": loss.detach()}
        if self.kl_loss_coef:
            assert batch.ref_logprobs is not None and batch.kl_weights is not None
            ref = torch.where(inputs.mask, batch.ref_logprobs, 0.0)
            kl = _weighted_sum(kl_estimate(inputs.logprobs, ref, self.kl_estimator), batch.kl_weights)
            loss, parts["policy_kl"] = loss + self.kl_loss_coef * kl, kl.detach()
        if self.wants_entropy:
            assert entropy is not None and batch.entropy_weights is not None
            loss = loss - self.entropy_loss_coef * _weighted_sum(entropy, batch.entropy_weights)
        return loss, parts | {"final_loss": loss.detach()}, token_metrics


def old_logprobs(current: Tensor, batch: TrainingBatch) -> Tensor:
    """(B, L): log pi_old of each token. `current` (B, L) are the policy's own log-probabilities, without gradient."""
    if batch.old_logprobs is None:
        return current
    if batch.interpolation is None:
        return batch.old_logprobs
    return interpolated_logprobs(batch.old_logprobs, current, batch.interpolation)


def policy_objective(
    algorithm: AlgorithmConfig, *, micro_batch_rows: int = 1, has_teacher: bool = False
) -> PolicyObjective:
    """The objective that the configuration asks for. Raises `ConfigError` for an unknown loss.

    `micro_batch_rows` is `trainer.micro_train_batch_size_per_gpu`, which `token_mean_legacy` is defined by.
    """
    reduction = Reduction(
        name=algorithm.loss_reduction, max_seq_len=algorithm.max_seq_len, micro_batch_rows=micro_batch_rows
    )
    facts = loss_facts(algorithm)
    return PolicyObjective(
        zero_at_zero_advantage=facts.zero_at_zero_advantage,
        policy_loss=policy_loss(algorithm, reduction),
        kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss and not facts.learns_from_pairs else 0.0,
        kl_estimator=algorithm.kl_estimator_type,
        entropy_loss_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        distills=has_teacher and algorithm.distillation.type == "loss",
        reduction=unit_weights if facts.learns_from_pairs else reduction,
        correction=off_policy_correction(algorithm.off_policy_correction),
    )


def off_policy_correction(config: OffPolicyCorrectionConfig) -> OffPolicyCorrection:
    """The corrections that the configuration asks for."""
    geometric = config.sequence_mask_metric == "geometric"
    return OffPolicyCorrection(
        outlier_token=Bounds(low=config.outlier_token_is_threshold_low, high=config.outlier_token_is_threshold_high),
        token_mask=Bounds(low=config.token_mask_is_threshold_low, high=config.token_mask_is_threshold_high),
        tis=config.tis_ratio_type,
        tis_cap=config.sequence_tis_ratio_clip_high
        if config.tis_ratio_type == "sequence"
        else config.token_tis_ratio_clip_high,
        sequence_metric=config.sequence_mask_metric,
        sequence_mask=Bounds(
            low=config.geo_mask_low if geometric else config.product_mask_low,
            high=config.geo_mask_high if geometric else config.product_mask_high,
        ),
    )


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight x value; values with weight 0 are masked out, so that a NaN among them reaches no gradient."""
    return (torch.where(weights != 0, values, 0.0) * weights).sum()


def policy_loss(algorithm: AlgorithmConfig, reduction: Reduction | None = None) -> PolicyLoss:
    """The loss that the configuration asks for. A built-in one has the fields that its line in `POLICY_LOSSES` names,
    and those of its table, under the same names. Raises `ConfigError` for an unknown loss, and for one of SkyRL's or
    verl's form that does not suit the reduction.
    """
    if algorithm.policy_loss_type not in POLICY_LOSSES:
        user_loss: PolicyLoss = PolicyLossRegistry.object(algorithm.policy_loss_type, algorithm.policy_loss)
        signature = peer_signature_of(user_loss, LOSS_SIGNATURES)
        if signature is None:
            return checked_per_token_loss(user_loss, algorithm.policy_loss_type)
        weigh = reduction or Reduction(name=algorithm.loss_reduction, max_seq_len=algorithm.max_seq_len)
        return checked_loss(ReducedLoss(function=user_loss, signature=signature, algorithm=algorithm), weigh)
    facts = loss_facts(algorithm)
    settings = {name: getattr(algorithm, name) for name in facts.fields}
    if facts.table:
        table = getattr(algorithm, facts.table)
        settings |= {name: getattr(table, name) for name in fields_of(type(table))}
    loss: PolicyLoss = load_builtin(f"skyrl.algorithms.{facts.loss_class}")(**settings)
    return loss
