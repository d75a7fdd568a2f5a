"""Selects the advantage estimator of a configuration; no other module does."""

from __future__ import annotations

from functools import partial

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
from skyrl.algorithms.masked import standardize
from skyrl.algorithms.returns import generalized_advantages, teacher_advantages
from skyrl.algorithms.rewards import normalize
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, DistillationConfig, NormConfig, TrainerConfig
from skyrl.config.derive.algorithm_facts import estimator_facts
from skyrl.config.foundation.peer_signatures import ESTIMATOR_SIGNATURES, peer_signature_of
from skyrl.config.settings.registry import AdvantageEstimatorRegistry
from skyrl.errors import RunError
from skyrl.training.peer_functions import PeerEstimator, checked_estimator


def advantages_of(trainer: TrainerConfig) -> AdvantageEstimator:
    """The advantages of a run: those of the configured estimator, and those from a teacher if there is one."""
    estimate = advantage_estimator(trainer.algorithm)
    teacher, itself = trainer.teacher, trainer.algorithm.distillation.self_teacher
    if not (teacher.local_paths or teacher.endpoint.url or teacher.endpoint.sources or itself):
        return estimate
    return WithTeacher(estimate=estimate, settings=trainer.algorithm.distillation)


def advantage_estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator:
    """The estimator that the configuration asks for, with the configured normalisation of advantages.

    Raises `ConfigError` for an unknown estimator.
    """
    estimate = Masked(estimate=_estimator(algorithm))
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


@attrs.frozen(kw_only=True)
class CriticTargets:
    """Targets of a critic: lambda-returns, or plain discounted returns if the advantages do not use values."""

    gamma: float
    lambd: float

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): target of each token, 0 outside the mask."""
        assert batch.values is not None
        return generalized_advantages(batch.rewards, batch.values, batch.loss_mask, gamma=self.gamma, lambd=self.lambd)[
            1
        ]


def critic_targets(algorithm: AlgorithmConfig) -> CriticTargets:
    """The configured targets of a critic."""
    reads_lambda = "lambd" in estimator_facts(algorithm).fields
    return CriticTargets(gamma=algorithm.gamma, lambd=algorithm.lambd if reads_lambda else 1.0)


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


def _estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator:
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
    user_estimator: AdvantageEstimator = AdvantageEstimatorRegistry.object(name, algorithm.advantage)
    signature = peer_signature_of(user_estimator, ESTIMATOR_SIGNATURES)
    if signature is None:
        return user_estimator
    return checked_estimator(PeerEstimator(function=user_estimator, signature=signature, algorithm=algorithm))
