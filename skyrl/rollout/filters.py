"""Filters of groups by the rewards that environments gave, before any shaping, and gates: which groups are trained on.

A group passes if every gate lets it, and is counted at the first that does not. Another prompt's group takes the place
of one that is left out. Samplers of prompts observe both: a gate decides only what is trained on, not what a sampler
learns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import attrs

from skyrl.config.settings.algorithm import DynamicSamplingConfig
from skyrl.errors import RunError
from skyrl.processes.calls import summary
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


Gate = Callable[[TrajectoryGroup], bool]

MOST_REFUSED_IN_A_ROW = 1000
"""Number of groups that a user's gate refuses in a row after which the run fails; the size of 30 batches if that is
more."""

_ACCEPT = "the function of trainer.fully_async.accept"


def is_within_bands(group: TrajectoryGroup, config: DynamicSamplingConfig) -> bool:
    """Whether the group's share of answers with a reward above 0, and its mean reward, are within `config`'s bounds.

    Answers without a token to train on do not count.
    """
    rewards = [row.reward for row in group.trajectories if row.trained]
    share = sum(reward > 0 for reward in rewards) / len(rewards) if rewards else 0.0
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    lowest, highest = config.min_mean_reward, config.max_mean_reward
    return (
        config.min_success_rate <= share <= config.max_success_rate
        and (lowest is None or lowest <= mean)
        and (highest is None or mean <= highest)
    )


class Gates:
    """All gates of a run, and how many groups each has left out since the last batch."""

    def __init__(self, config: DynamicSamplingConfig, accept: Gate | None = None, *, batch: int = 0) -> None:
        """`accept` is a user's gate, which may refuse 1,000 groups in a row, or those of 30 batches of `batch`."""
        # Groups without a signal (DAPO, arXiv:2503.14476, section 3.2), and groups outside a band of success (AReaL's
        # `success_rate_lb` and `success_rate_ub`) or of rewards.
        self._builtin_gates: dict[str, Gate] = {}
        if config.type == "filter":
            self._builtin_gates = {
                "without_signal": lambda group: has_reward_variance(group, tolerance=config.min_reward_spread),
                "outside_bands": lambda group: is_within_bands(group, config),
            }
        self._accept = accept
        self._most = max(MOST_REFUSED_IN_A_ROW, 30 * batch)
        self._in_a_row = 0
        self.left_out: Counter[str] = Counter()
        """Groups left out by dynamic sampling, by the gate that did; a reader may clear it."""

    def pass_through(self, group: TrajectoryGroup) -> bool:
        """Whether the group may be trained on. Raises `RunError` if the user's gate fails, returns no bool or refuses
        everything.
        """
        for name, gate in self._builtin_gates.items():
            if not gate(group):
                self.left_out[name] += 1
                return False
        return self._accept is None or self._ask(self._accept, group)

    def metrics(self) -> dict[str, float]:
        """Groups left out by each gate since the last batch."""
        return {f"generate/groups_{name}": self.left_out[name] for name in self._builtin_gates}

    def _ask(self, accept: Gate, group: TrajectoryGroup) -> bool:
        try:
            answer: object = accept(group)
        except Exception as error:
            raise RunError(f"{_ACCEPT} raised {summary(error)} for the group of prompt {group.prompt.id}") from error
        if type(answer).__name__ not in ("bool", "bool_"):  # the latter is numpy's
            raise RunError(
                f"{_ACCEPT} returned {answer!r:.100} for the group of prompt {group.prompt.id}; it has to return True "
                "or False"
            )
        self._in_a_row = 0 if answer else self._in_a_row + 1
        if self._in_a_row >= self._most:
            raise RunError(
                f"{_ACCEPT} refused {self._in_a_row} groups in a row, the last of which is that of prompt "
                f"{group.prompt.id} with rewards {list(group.rewards)!r:.100}: with such groups no batch is ever full"
            )
        return bool(answer)
