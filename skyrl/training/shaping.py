"""Selects the reward shaping of a configuration; no other module does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, KLEstimator, kl_estimate
from skyrl.algorithms.rewards import added_at, less_the_divergence, overlong_penalty, scaled
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, NormConfig, RewardShapingConfig
from skyrl.training.advantage import normalize_by_config
from skyrl.training.describe import Metrics
from skyrl.tree import required


class RewardShaping:
    """Overlong penalty, scale, bounds and norm of an answer's reward, then the KL penalty of its tokens.

    It holds state that changes during a run: the weight of the KL penalty.
    """

    def __init__(self, config: RewardShapingConfig, penalty: KLPenalty | None) -> None:
        """`penalty` is None where there is no KL in the reward."""
        self._config, self._penalty = config, penalty
        self._changes_totals = config != RewardShapingConfig()

    def __call__(self, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Rewards at tokens, (B, L), and metrics."""
        rewards = self._shaped(batch) if self._changes_totals else batch.rewards
        if self._penalty is None:
            return rewards, {}
        return self._penalty(batch.with_fields(rewards=rewards))

    def _shaped(self, batch: TrainingBatch) -> Tensor:
        """Turns keep their scaled rewards; the difference between their sum and the shaped reward of the whole answer
        is added to the last trained token, or to the row's last token if none is trained on.
        """
        config = self._config
        totals = batch.over_trajectories(batch.scores)
        if config.overlong.buffer_len is not None:
            assert batch.trajectory_lengths is not None
            totals = totals + overlong_penalty(
                batch.trajectory_lengths,
                longest=required(config.overlong.max_len, "trainer.algorithm.reward_shaping.overlong.max_len"),
                buffer=config.overlong.buffer_len,
                factor=config.overlong.penalty_factor,
                floor=config.overlong.floor,
            )
        totals = scaled(totals, bias=config.bias, scale=config.scale, clip=config.clip)
        if config.norm != NormConfig():  # statistics exclude answers that are not trained on
            trained = batch.over_trajectories(batch.loss_mask.sum(1)) > 0
            totals = normalize_by_config(config.norm, totals, batch.groups, batch.ends & trained)
        rewards = batch.rewards * config.scale
        missing = totals - batch.over_trajectories(rewards.sum(1))
        columns = torch.arange(batch.loss_mask.shape[1], device=batch.loss_mask.device)
        last_trained = torch.where(batch.loss_mask, columns, -1).amax(1)
        last = torch.where(last_trained < 0, batch.lengths - 1, last_trained)
        return added_at(rewards, torch.where(batch.ends, missing, 0.0), last)

    def state(self) -> dict[str, Any]:
        """State of the shaping, as a checkpoint stores it."""
        return {} if self._penalty is None else {"kl_coef": self._penalty.controller.value}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        if self._penalty is not None:
            self._penalty.controller.value = float(state["kl_coef"])


class KLPenalty:
    """Subtracts beta KL(pi_old || pi_ref) from the reward of each token, and updates the controller of beta."""

    def __init__(self, controller: KLController, estimator: KLEstimator) -> None:
        self.controller, self._estimator = controller, estimator

    def __call__(self, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Rewards at tokens, (B, L), and metrics. The batch holds old and reference log-probabilities."""
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        divergence = kl_estimate(batch.old_logprobs, batch.ref_logprobs, self._estimator)
        divergence = torch.where(batch.loss_mask, divergence, 0.0)
        weight = self.controller.value
        rewards = less_the_divergence(batch.rewards, divergence, batch.loss_mask, weight=weight)
        tokens = batch.over_trajectories(batch.loss_mask.sum(1)).clamp(min=1)
        mean = (batch.over_trajectories(divergence.sum(1)) / tokens)[batch.ends].mean().item()
        self.controller.update(mean, batch.answers)
        return rewards, {
            "loss/avg_kl": mean,
            "loss/avg_kl_max": batch.over_trajectories(divergence.amax(1), "amax")[batch.ends].mean().item(),
            "loss/kl_loss_coef": weight,
        }


def reward_shaping(algorithm: AlgorithmConfig) -> RewardShaping:
    """Reward shaping that the configuration asks for."""
    if not algorithm.use_kl_in_reward:
        return RewardShaping(algorithm.reward_shaping, None)
    control, weight = algorithm.kl_ctrl, algorithm.kl_loss_coef
    controller: KLController = FixedKLController(weight)
    if control.type == "adaptive":
        controller = AdaptiveKLController(weight, target=control.kl_target, horizon=control.horizon)
    return RewardShaping(algorithm.reward_shaping, KLPenalty(controller, algorithm.kl_estimator_type))
