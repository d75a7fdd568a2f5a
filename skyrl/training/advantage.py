"""Selects the reward shaping and the advantage estimator of a configuration; no other module does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.advantages import (
    group_relative,
    leave_one_out,
    relative_to_mean,
    rescaled_for_silent_groups,
)
from skyrl.algorithms.estimators import (
    GAE,
    OPO,
    AdvantageEstimator,
    Compared,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from skyrl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, KLEstimator, kl_estimate
from skyrl.algorithms.masked import standardize
from skyrl.algorithms.returns import generalized_advantages, teacher_advantages
from skyrl.algorithms.rewards import added_at, less_the_divergence, normalize, overlong_penalty, scaled
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, DistillationConfig, NormConfig, RewardShapingConfig, TrainerConfig
from skyrl.config.derive.algorithm_facts import estimator_facts
from skyrl.config.foundation.peer_signatures import ESTIMATOR_SIGNATURES, peer_signature_of
from skyrl.config.settings.registry import AdvantageEstimatorRegistry
from skyrl.errors import RunError
from skyrl.training.describe import Metrics
from skyrl.training.peer_functions import PeerEstimator, try_estimator
from skyrl.tree import required


def advantages_of(trainer: TrainerConfig, answers: int) -> AdvantageEstimator:
    """The advantages of a run with so many answers to a prompt: those of the configured estimator, and those from a
    teacher if there is one. Raises as `advantage_estimator`.
    """
    estimate = advantage_estimator(trainer.algorithm, answers)
    teacher, itself = trainer.teacher, trainer.algorithm.distillation.self_teacher
    if not (teacher.local_paths or teacher.endpoint.url or teacher.endpoint.sources or itself):
        return estimate
    return WithTeacher(estimate=estimate, settings=trainer.algorithm.distillation)


def advantage_estimator(algorithm: AlgorithmConfig, answers: int = 5) -> AdvantageEstimator:
    """The estimator that the configuration asks for, with the configured normalisation of advantages.

    Raises `ConfigError` for an unknown estimator, and for one of the user's own that fails with a small batch, which
    has so many `answers` to each prompt.
    """
    estimate = Masked(estimate=_estimator(algorithm, answers))
    if algorithm.advantage_batch_normalize:
        return Standardized(estimate=estimate)
    norm = algorithm.advantage_norm
    return Normalized(estimate=estimate, norm=norm) if norm != NormConfig() else estimate


@attrs.frozen(kw_only=True)
class Masked:
    """Wraps an estimator: its result is set to 0 at tokens that the policy did not sample."""

    estimate: AdvantageEstimator

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        return torch.where(batch.loss_mask, self.estimate(batch), 0.0)


@attrs.frozen(kw_only=True)
class Standardized:
    """Wraps an estimator: standardises its advantages over the batch (`advantage_batch_normalize`)."""

    estimate: AdvantageEstimator

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        return standardize(self.estimate(batch), batch.loss_mask)


@attrs.frozen(kw_only=True)
class Normalized:
    """Wraps an estimator: normalises its advantages over tokens (`advantage_norm`)."""

    estimate: AdvantageEstimator
    norm: NormConfig

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        advantages = self.estimate(batch)
        groups = batch.groups.unsqueeze(1).expand_as(advantages)
        flat = normalize_by_config(self.norm, advantages.flatten(), groups.flatten(), batch.loss_mask.flatten())
        return flat.view_as(advantages)


@attrs.frozen(kw_only=True)
class WithTeacher:
    """Wraps an estimator: its advantages are scaled by `task_coef`, and those from a teacher's log-probabilities are
    added, unless the teacher has a part in the loss.
    """

    estimate: AdvantageEstimator
    settings: DistillationConfig

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        settings = self.settings
        advantages = settings.task_coef * self.estimate(batch)
        if settings.type == "loss":
            return advantages
        assert batch.teacher_logprobs is not None
        sampled, mask = sampler_logprobs(batch), batch.loss_mask
        added = teacher_advantages(sampled, batch.teacher_logprobs, mask, discount=settings.discount)
        return advantages + settings.coef * added


def sampler_logprobs(batch: TrainingBatch) -> Tensor:
    """(B, L): log-probabilities of the policy that sampled, by the learner if it scored them, else by the engine.

    Raises `RunError` if there are none, as in a recording made without them.
    """
    logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    if logprobs is None:
        raise RunError(
            "the teacher's log-probabilities are compared with those that tokens were sampled with, which these "
            "samples lack: sample them with generator.sampling_params.logprobs = 1, or set "
            "trainer.algorithm.distillation.type = loss"
        )
    return logprobs


def critic_targets(algorithm: AlgorithmConfig) -> Callable[[TrainingBatch], Tensor]:
    """The configured targets of a critic, (B, L), 0 outside the mask: lambda-returns, or discounted returns if the
    advantages do not use values.
    """
    gamma, lambd = algorithm.gamma, algorithm.lambd if "lambd" in estimator_facts(algorithm).fields else 1.0

    def targets(batch: TrainingBatch) -> Tensor:
        assert batch.values is not None
        _, returns = generalized_advantages(batch.rewards, batch.values, batch.loss_mask, gamma=gamma, lambd=lambd)
        return returns

    return targets


def normalize_by_config(norm: NormConfig, values: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """`normalize` with the settings of a `NormConfig`. Shapes: all (N,)."""
    return normalize(
        values,
        groups,
        mask,
        mean_level=norm.mean_level,
        std_level=norm.std_level,
        leave_one_out=norm.mean_leave1out,
        unbiased=norm.std_unbiased,
        eps=norm.eps,
    )


def _estimator(algorithm: AlgorithmConfig, answers: int) -> AdvantageEstimator:
    name = algorithm.advantage_estimator
    match name:
        case "grpo":
            return Compared(partial(group_relative, normalize_by_std=algorithm.grpo_norm_by_std))
        case "rloo":
            return Compared(leave_one_out)
        case "maxrl":
            return Compared(relative_to_mean)
        case "reinforce++":
            return ReinforcePlusPlus(gamma=algorithm.gamma, whitened=algorithm.whiten_advantages)
        case "reinforce++-baseline":
            return ReinforcePlusPlusBaseline()
        case "gae":
            return GAE(gamma=algorithm.gamma, lambd=algorithm.lambd, whitened=algorithm.whiten_advantages)
        case "remax":
            return ReMax()
        case "opo":
            return OPO()
        case "gpg":
            return Compared(rescaled_for_silent_groups)
    try_estimator(_user_estimator(algorithm), algorithm, answers)
    return _user_estimator(algorithm)  # another object: the one that was tried may have counted the call


def _user_estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator:
    user_estimator: AdvantageEstimator = AdvantageEstimatorRegistry.object(
        algorithm.advantage_estimator, algorithm.advantage
    )
    signature = peer_signature_of(user_estimator, ESTIMATOR_SIGNATURES)
    if signature is None:
        return user_estimator
    return PeerEstimator(function=user_estimator, signature=signature, algorithm=algorithm)


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
