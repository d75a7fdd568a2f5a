"""From configuration to loss: which policy loss, which KL estimate, and how tokens are weighed. The one place that
selects.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.kl import KLEstimator, kl_estimate
from skyrl.algorithms.losses import LossInputs, PolicyLoss, clipped_share, ppo_clip
from skyrl.algorithms.reductions import sequence_mean, token_mean
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig
from skyrl.errors import ConfigError, Problem


@attrs.frozen(kw_only=True)
class RegularLoss:
    """`policy_loss_type = "regular"`: PPO's clipped surrogate."""

    clip_low: float
    clip_high: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        return ppo_clip(
            inputs.logprobs, inputs.old_logprobs, inputs.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )

    def measure(self, inputs: LossInputs) -> dict[str, float]:
        return {"clip_ratio": clipped_share(inputs, clip_low=self.clip_low, clip_high=self.clip_high).item()}


@attrs.frozen(kw_only=True)
class PolicyObjective:
    """What one optimizer step of the policy minimises over a mini-batch.

        sum_t weight_t loss_t  +  kl_loss_coef * mean over answers of mean over tokens of KL(pi || pi_ref)

    `weigh` is called once with the whole mini-batch; the object itself then with each micro-batch, whose losses add up.
    """

    policy_loss: PolicyLoss
    kl_loss_coef: float
    """0 when the KL loss is off: then no reference log-probabilities are looked at."""

    kl_estimator: KLEstimator

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        """The mini-batch with the share of each of its tokens in the loss filled in."""
        return batch.given(loss_weights=token_mean(batch.loss_mask), kl_weights=sequence_mean(batch.loss_mask))

    def __call__(self, logprobs: Tensor, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """Loss of one micro-batch (a scalar with gradient) and its parts, each a sum to be added over micro-batches.

        `logprobs` (B, L) are the current policy's; where the batch has no old ones, they are these, without gradient.
        """
        assert batch.advantages is not None and batch.loss_weights is not None and batch.kl_weights is not None
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            mask=batch.loss_mask,
        )
        policy_loss = _weighted_sum(self.policy_loss(inputs), batch.loss_weights)
        share = batch.loss_weights.sum().item()  # of this micro-batch in the mini-batch
        parts = {name: value * share for name, value in self.policy_loss.measure(inputs).items()}
        parts["policy_loss"] = policy_loss.item()
        if not self.kl_loss_coef:
            return policy_loss, parts | {"final_loss": policy_loss.item()}
        assert batch.ref_logprobs is not None
        kl = _weighted_sum(kl_estimate(logprobs, batch.ref_logprobs, self.kl_estimator), batch.kl_weights)
        loss = policy_loss + self.kl_loss_coef * kl
        return loss, parts | {"policy_kl": kl.item(), "final_loss": loss.item()}


def policy_objective(algorithm: AlgorithmConfig) -> PolicyObjective:
    """The objective that the configuration asks for. Raises `ConfigError` for a loss that does not exist."""
    return PolicyObjective(
        policy_loss=_policy_loss(algorithm),
        kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        kl_estimator=algorithm.kl_estimator_type,
    )


def _policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    match algorithm.policy_loss_type:
        case "regular":
            return RegularLoss(clip_low=algorithm.eps_clip_low, clip_high=algorithm.eps_clip_high)
        case unknown:
            raise ConfigError(
                [Problem(path="trainer.algorithm.policy_loss_type", message=f"no policy loss {unknown!r}")]
            )


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight x value; where the weight is 0 the value is not touched, so that NaN there reaches no gradient."""
    return (torch.where(weights != 0, values, 0.0) * weights).sum()
