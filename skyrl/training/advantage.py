"""From configuration to advantage estimator. The one place that selects."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from skyrl.algorithms.advantages import group_relative
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig
from skyrl.errors import ConfigError, Problem

Estimator = Callable[[TrainingBatch], Tensor]
"""A batch with rewards -> advantages (B, L), 0 where `loss_mask` is false."""


def advantage_estimator(algorithm: AlgorithmConfig) -> Estimator:
    """The estimator that the configuration asks for. Raises `ConfigError` for one that does not exist."""
    match algorithm.advantage_estimator:
        case "grpo":
            return lambda batch: grpo(batch, normalize_by_std=algorithm.grpo_norm_by_std)
        case unknown:
            path = "trainer.algorithm.advantage_estimator"
            raise ConfigError([Problem(path=path, message=f"no advantage estimator {unknown!r}")])


def grpo(batch: TrainingBatch, *, normalize_by_std: bool) -> Tensor:
    """Every token of an answer gets the answer's group-relative advantage."""
    scores = batch.rewards.sum(dim=1)
    advantages = group_relative(scores, batch.groups, normalize_by_std=normalize_by_std)
    return advantages.unsqueeze(1) * batch.loss_mask
