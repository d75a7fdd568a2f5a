"""Metrics of a step, under the names that SkyRL uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean

import torch

from skyrl.batch import TrainingBatch
from skyrl.rollout.measures import measure
from skyrl.trajectory import Trajectory, TrajectoryGroup

Metrics = dict[str, float]


def describe(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Rewards and lengths of the samples; dropped groups are counted, but excluded from every other metric."""
    counted = [group for group in groups if not group.dropped]
    if not counted:
        return measure(groups)
    of_groups = [group.rewards for group in counted]
    rewards = [reward for group_rewards in of_groups for reward in group_rewards]
    samples = max(len(group.trajectories) for group in counted)
    return {
        "reward/avg_raw_reward": fmean(rewards),
        "reward/mean_positive_reward": mean_positive([row for group in counted for row in group.trajectories]),
        f"reward/avg_pass_at_{samples}": fmean(any(reward > 0 for reward in group.rewards) for group in counted),
        "reward/zero_variance_groups": fmean(len(set(group_rewards)) == 1 for group_rewards in of_groups),
        **measure(groups),
    }


def describe_advantages(batch: TrainingBatch) -> Metrics:
    """Rewards as they are trained on, and advantages per token."""
    assert batch.advantages is not None
    advantages = batch.advantages[batch.loss_mask]
    if not len(advantages):  # nothing is trained on
        advantages = torch.zeros(1)
    return {
        "loss/avg_final_rewards": batch.rewards.sum().item() / batch.answers,
        "loss/avg_raw_advantages": advantages.mean().item(),
        "loss/avg_raw_advantages_abs": advantages.abs().mean().item(),
        "loss/rows_without_advantage": (batch.advantages == 0).all(1).float().mean().item(),
    }


def mean_positive(answers: Sequence[Trajectory]) -> float:
    """Mean over answers of the sum over turns of the positive part of each turn's reward, as SkyRL defines it."""
    return fmean(answer.positive_reward for answer in answers)


def average(updates: Sequence[Mapping[str, float]]) -> Metrics:
    """Mean of each metric over the optimizer steps of a batch; `skipped_updates` counts the skipped ones.

    Metrics of skipped steps are left out. If all steps were skipped, non-finite metrics are left out; without any step
    the result is empty.
    """
    if not updates:
        return {"skipped_updates": 0.0}
    applied = [update for update in updates if not update["skipped_updates"]] or updates
    names = dict.fromkeys(name for update in applied for name in update)
    means = {name: fmean(update[name] for update in applied if name in update) for name in names}
    finite = {name: mean for name, mean in means.items() if isfinite(mean)}
    return finite | {"skipped_updates": sum(update["skipped_updates"] for update in updates)}


def prefixed(prefix: str, metrics: Mapping[str, float]) -> Metrics:
    """The metrics under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
