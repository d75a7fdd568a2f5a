"""A step in numbers, under the names that SkyRL's users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, pstdev

import torch

from skyrl.batch import TrainingBatch
from skyrl.trajectory import Trajectory, TrajectoryGroup

Metrics = dict[str, float]


def describe(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Rewards and lengths of what was sampled."""
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [row.reward for row in rows]
    samples = max(len(group.trajectories) for group in groups)
    return {
        "reward/avg_raw_reward": fmean(rewards),
        "reward/mean_positive_reward": mean_positive(rewards),
        f"reward/avg_pass_at_{samples}": pass_rate(groups),
        "reward/zero_variance_groups": fmean(len(set(group.rewards)) == 1 for group in groups),
        **_lengths(rows),
        **_environment(rows),
    }


def describe_advantages(batch: TrainingBatch) -> Metrics:
    """Rewards as they are trained on, and advantages per token."""
    assert batch.advantages is not None
    advantages = batch.advantages[batch.loss_mask]
    if not len(advantages):  # nothing is trained on
        advantages = torch.zeros(1)
    return {
        "loss/avg_final_rewards": batch.rewards.sum(1).mean().item(),
        "loss/avg_raw_advantages": advantages.mean().item(),
        "loss/avg_raw_advantages_abs": advantages.abs().mean().item(),
        "loss/rows_without_advantage": (batch.advantages == 0).all(1).float().mean().item(),
    }


def pass_rate(groups: Sequence[TrajectoryGroup]) -> float:
    """Share of prompts with at least one answer of positive reward: pass@n for n samples."""
    return fmean(any(reward > 0 for reward in group.rewards) for group in groups)


def mean_positive(rewards: Sequence[float]) -> float:
    """Mean over all answers of the positive part of the reward."""
    return fmean(max(reward, 0.0) for reward in rewards)


def average(updates: Sequence[Mapping[str, float]]) -> Metrics:
    """Mean of each metric over the optimizer steps of a batch; `skipped_updates` is their number.

    What a skipped step measured is left out; where all were skipped, metrics that are not finite are left out, and
    where there was no step at all there is nothing to say.
    """
    if not updates:
        return {"skipped_updates": 0.0}
    taken = [update for update in updates if not update["skipped_updates"]] or updates
    names = dict.fromkeys(name for update in taken for name in update)
    means = {name: fmean(update[name] for update in taken if name in update) for name in names}
    finite = {name: mean for name, mean in means.items() if isfinite(mean)}
    return finite | {"skipped_updates": sum(update["skipped_updates"] for update in updates)}


def prefixed(prefix: str, metrics: Mapping[str, float]) -> Metrics:
    """The same metrics under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _lengths(rows: Sequence[Trajectory]) -> Metrics:
    counts = [len(row.response_ids) for row in rows]
    good = [count for count, row in zip(counts, rows, strict=True) if row.reward != 0]
    bad = [count for count, row in zip(counts, rows, strict=True) if row.reward == 0]
    return {
        "generate/min_num_tokens": min(counts),
        "generate/max_num_tokens": max(counts),
        "generate/avg_num_tokens": fmean(counts),
        "generate/std_num_tokens": pstdev(counts),
        "generate/avg_tokens_non_zero_rewards": fmean(good) if good else 0.0,
        "generate/avg_tokens_zero_rewards": fmean(bad) if bad else 0.0,
        "generate/truncated_ratio": fmean(row.stop_reason == "length" for row in rows),
        "generate/num_tokens": sum(counts),
    }


def _environment(rows: Sequence[Trajectory]) -> Metrics:
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return {f"environment/{name}": fmean(row.metrics[name] for row in rows if name in row.metrics) for name in names}
