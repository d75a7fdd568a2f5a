"""Filters of groups by the rewards that environments gave, before any shaping."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import attrs

from skyrl.trajectory import Trajectory, TrajectoryGroup


def has_reward_variance(group: TrajectoryGroup, *, tolerance: float = 0.0) -> bool:
    """Whether the rewards of the group's answers differ by more than `tolerance`, or there is only one answer.

    Answers without a token to train on are not compared. Dynamic sampling, DAPO, arXiv:2503.14476, section 3.2.
    """
    rewards = [row.reward for row in group.trajectories if row.trained]
    return len(rewards) == 1 or (len(rewards) > 1 and max(rewards) - min(rewards) > tolerance)


def masked_out(group: TrajectoryGroup) -> TrajectoryGroup:
    """A copy of the group with no token to train on: it counts in every mean of rewards, and in no loss."""
    return attrs.evolve(group, trajectories=tuple(row.masked() for row in group.trajectories))


def drop_truncated(row: Trajectory) -> Trajectory:
    """A copy of the answer, with no token to train on if it was cut off. Overlong filtering, DAPO, arXiv:2503.14476,
    section 3.4.
    """
    return row if row.stop_reason == "stop" else row.masked()


def backfilled(group: TrajectoryGroup) -> TrajectoryGroup:
    """A copy of the group, in which the next sample with a reward replaces each that has none, if there is one."""
    rows = group.trajectories
    good = [index for index, row in enumerate(rows) if not row.missing]
    if not good or len(good) == len(rows):
        return group

    def standing_in(index: int) -> Trajectory:
        replacement, own = rows[min(good, key=lambda other: (other - index) % len(rows))], rows[index]
        return attrs.evolve(
            replacement, sample_index=own.sample_index, failures=own.failures, skipped=own.skipped, filled=True
        )

    trajectories = [standing_in(index) if row.missing else row for index, row in enumerate(rows)]
    return attrs.evolve(group, trajectories=tuple(trajectories))


def with_replacements(
    groups: Sequence[TrajectoryGroup], *, least_good: float, draw: Random
) -> tuple[TrajectoryGroup, ...] | None:
    """The groups, with each group of equal rewards replaced by a random one whose rewards differ; None unless more than
    the share `least_good` of the groups have different rewards. POLARIS, hkunlp.github.io/blog/2025/Polaris.
    """
    good = [group for group in groups if has_reward_variance(group)]
    if not good or len(good) <= least_good * len(groups):
        return None
    return tuple(group if has_reward_variance(group) else draw.choice(good) for group in groups)
