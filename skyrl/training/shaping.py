"""From the rewards that environments gave to those that are compared: the one place that selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.algorithms.kl import KLEstimator, kl_estimate
from skyrl.algorithms.kl_control import AdaptiveKLController, FixedKLController, KLController
from skyrl.algorithms.masked import masked_mean
from skyrl.algorithms.rewards import less_the_divergence, overlong_penalty, scaled, with_totals
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, NormConfig, RewardShapingConfig
from skyrl.training.advantage import by_config
from skyrl.training.describe import Metrics
from skyrl.tree import required


class RewardShaping:
    """Overlong penalty, scale, bounds and norm of an answer's reward, then the KL penalty of its tokens.

    It holds what changes while a run goes on: the weight of the KL penalty.
    """

    def __init__(self, config: RewardShapingConfig, penalty: KLPenalty | None) -> None:
        """`penalty` is None where there is no KL in the reward."""
        self._config, self._penalty = config, penalty
        self._changes_totals = config != RewardShapingConfig()

    def __call__(self, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Rewards at tokens, (B, L), and what there is to log."""
        rewards = self._shaped(batch) if self._changes_totals else batch.rewards
        if self._penalty is None:
            return rewards, {}
        return self._penalty(batch.given(rewards=rewards))

    def _shaped(self, batch: TrainingBatch) -> Tensor:
        config, totals = self._config, _of_answers(batch, batch.scores)
        if config.overlong.buffer_len is not None:
            assert batch.answer_lengths is not None
            totals = totals + overlong_penalty(
                _of_answers(batch, batch.answer_lengths),
                longest=required(config.overlong.max_len, "trainer.algorithm.reward_shaping.overlong.max_len"),
                buffer=config.overlong.buffer_len,
                factor=config.overlong.penalty_factor,
                floor=config.overlong.floor,
            )
        totals = scaled(totals, bias=config.bias, scale=config.scale, clip=config.clip)
        if config.norm != NormConfig():
            last = torch.ones_like(batch.lengths, dtype=torch.bool) if batch.last_step is None else batch.last_step
            totals = by_config(config.norm, totals, batch.groups, last)
        rewards = batch.rewards * config.scale
        if batch.last_step is not None:  # what is missing goes to the last row, which stands for the whole answer
            own = rewards.sum(1)
            totals = torch.where(batch.last_step, totals - _of_answers(batch, own) + own, own)
        return with_totals(rewards, totals, _last_selected(batch))

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        return {} if self._penalty is None else {"kl_coef": self._penalty.controller.value}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        if self._penalty is not None:
            self._penalty.controller.value = float(state["kl_coef"])


class KLPenalty:
    """Takes beta KL(pi_old || pi_ref) from the reward of each token, and lets the controller see how large it was."""

    def __init__(self, controller: KLController, estimator: KLEstimator) -> None:
        self.controller, self._estimator = controller, estimator

    def __call__(self, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """Rewards at tokens, (B, L), and what there is to log. The batch holds old and reference log-probabilities."""
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        divergence = kl_estimate(batch.old_logprobs, batch.ref_logprobs, self._estimator)
        divergence = torch.where(batch.loss_mask, divergence, 0.0)
        weight = self.controller.value
        rewards = less_the_divergence(batch.rewards, divergence, batch.loss_mask, weight=weight)
        mean = masked_mean(divergence, batch.loss_mask, dim=1).mean().item()
        self.controller.update(mean, batch.answers)
        return rewards, {
            "loss/avg_kl": mean,
            "loss/avg_kl_max": divergence.amax(1).mean().item(),
            "loss/kl_loss_coef": weight,
        }


def reward_shaping(algorithm: AlgorithmConfig) -> RewardShaping:
    """What the configuration asks for."""
    penalty = KLPenalty(_controller(algorithm), algorithm.kl_estimator_type) if algorithm.use_kl_in_reward else None
    return RewardShaping(algorithm.reward_shaping, penalty)


def _controller(algorithm: AlgorithmConfig) -> KLController:
    control = algorithm.kl_ctrl
    match control.type:
        case "fixed":
            return FixedKLController(algorithm.kl_loss_coef)
        case "adaptive":
            return AdaptiveKLController(algorithm.kl_loss_coef, target=control.kl_target, horizon=control.horizon)


def _of_answers(batch: TrainingBatch, numbers: Tensor) -> Tensor:
    """(B,) -> (B,): to each row the sum over all rows of its answer."""
    if batch.trajectories is None:
        return numbers
    sums = torch.zeros(len(batch), dtype=numbers.dtype, device=numbers.device)
    _, member = torch.unique(batch.trajectories, return_inverse=True)
    return sums.index_add_(0, member, numbers)[member]


def _last_selected(batch: TrainingBatch) -> Tensor:
    """(B,) int64: the last token of each row that is trained on; the last token of the row where there is none."""
    columns = torch.arange(batch.loss_mask.shape[1], device=batch.loss_mask.device)
    last = torch.where(batch.loss_mask, columns, -1).amax(1)
    return torch.where(last < 0, batch.lengths - 1, last)
