"""Metrics of rollouts: lengths, turns, time, failures, and the environments' own measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, pstdev, quantiles

from skyrl.trajectory import Trajectory, TrajectoryGroup

Metrics = dict[str, float]


def measure(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Metrics `generate/...`, `environment/...` and `reward/component/...` over the groups that count, and failures
    over all.
    """
    rows = [row for group in groups if not group.dropped for row in group.trajectories]
    if not rows:
        return count_failures(groups)
    parts = (
        *(_lengths(rows), _turns(rows), _times(rows)),
        _means("environment", [row.metrics for row in rows]),
        _means("reward/component", [row.components for row in rows]),
        count_failures(groups),
    )
    return {name: value for part in parts for name, value in part.items()}


def _lengths(rows: Sequence[Trajectory]) -> Metrics:
    counts = [row.length for row in rows]
    sampled = [sum(sum(token_row.loss_mask) for token_row in row.token_rows) for row in rows]
    rewards = [row.reward for row in rows]
    good = [index for index, reward in enumerate(rewards) if reward != 0]
    bad = [index for index, reward in enumerate(rewards) if reward == 0]
    return {
        **_spread("generate/{}_num_tokens", counts),
        "generate/avg_tokens_non_zero_rewards": _mean([counts[index] for index in good]),
        "generate/avg_tokens_zero_rewards": _mean([counts[index] for index in bad]),
        **_spread("generate/{}_assistant_tokens", sampled),
        "generate/avg_assistant_tokens_non_zero_rewards": _mean([sampled[index] for index in good]),
        "generate/avg_assistant_tokens_zero_rewards": _mean([sampled[index] for index in bad]),
        "generate/truncated_ratio": fmean(row.stop_reason != "stop" for row in rows),
        "generate/num_tokens": sum(counts),
        "generate/repeated_ratio": fmean(_repeated(row) for row in rows[:: -(-len(rows) // _LOOKED_AT)]),
    }


_LOOKED_AT, _LAST, _RUN = 64, 1024, 4
"""Limits of the search for repetitions: answers of a step, last tokens of each answer, and tokens of a run."""


def _repeated(row: Trajectory) -> float:
    """Share of the runs of four sampled tokens that repeat an earlier run of the answer; 0 if it has no run."""
    tokens_with_masks = [zip(token_row.response_ids, token_row.loss_mask, strict=True) for token_row in row.token_rows]
    sampled = [token for pairs in tokens_with_masks for token, mask in pairs if mask][-_LAST:]
    runs = [tuple(sampled[start : start + _RUN]) for start in range(len(sampled) - _RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _turns(rows: Sequence[Trajectory]) -> Metrics:
    """Metrics of turns. Every answer of the policy has a reward, so the rewards are as many as the turns; tokens are
    counted by run, and answers with nothing between them are one run.
    """
    token_rows = [token_row for row in rows for token_row in row.token_rows]
    turns = [length for token_row in token_rows for length in _runs(token_row.loss_mask)]
    return {
        "generate/avg_num_turns": sum(len(token_row.rewards) for token_row in token_rows) / len(rows),
        "generate/avg_num_rows": len(token_rows) / len(rows),
        "generate/tokens_per_turn_mean": _mean(turns),
        "generate/tokens_per_turn_std": pstdev(turns) if turns else 0.0,
        "generate/tokens_per_turn_max": max(turns, default=0),
    }


def _runs(loss_mask: Sequence[int]) -> list[int]:
    """Lengths of the runs of sampled tokens; most answers have one."""
    if len(loss_mask) and all(loss_mask):
        return [len(loss_mask)]
    return [len(list(run)) for sampled, run in groupby(loss_mask) if sampled]


def _times(rows: Sequence[Trajectory]) -> Metrics:
    """Seconds of a trajectory: in total, waiting for the engine, waiting for the environment, and the rest.

    The environment ran for `env_run` of its seconds; in the others, it waited for one of the `max_env_workers` threads.
    """
    clocks = [row.timings for row in rows if row.timings]
    if not clocks:
        return {}
    parts = {name: [clock[name] for clock in clocks] for name in ("completion", "llm", "env")}
    triples = zip(parts["completion"], parts["llm"], parts["env"], strict=True)
    parts["other"] = [max(0.0, completion - llm - env) for completion, llm, env in triples]
    if all("env_run" in clock for clock in clocks):
        parts["env_run"] = [clock["env_run"] for clock in clocks]
    metrics: Metrics = {}
    for name, seconds in parts.items():
        stem = f"generate/trajectory_time_{name}"
        deciles = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds  # of one: itself
        metrics |= {f"{stem}_mean": fmean(seconds), f"{stem}_p90": deciles[-1], f"{stem}_max": max(seconds)}
    return metrics


def _means(prefix: str, tables: Sequence[Mapping[str, float]]) -> Metrics:
    """Mean of each number over the trajectories that have it; `tables` has a table for each of them."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {f"{prefix}/{name}": fmean(table[name] for table in tables if name in table) for name in names}


def count_failures(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Metrics `rollout/...`, counts over the groups. A failure is not a reward of 0; it is counted only here."""
    rows = [row for group in groups for row in group.trajectories]
    kinds = [failure.kind for row in rows for failure in row.failures]
    counts: Metrics = {f"rollout/failures_{kind}": kinds.count(kind) for kind in dict.fromkeys(kinds)}
    drawn_again = [row for row in rows if any(failure.kind != "close" for failure in row.failures)]
    return counts | {
        "rollout/failures": len(kinds),
        "rollout/replaced_samples": sum(not (row.missing or row.filled) for row in drawn_again),
        "rollout/skipped_samples": sum(bool(row.skipped) for row in rows),
        "rollout/filled_samples": sum(row.filled for row in rows),
        "rollout/dropped_groups": sum(group.dropped for group in groups),
    }


def _spread(name: str, counts: Sequence[int]) -> Metrics:
    statistics: Mapping[str, Callable[[Sequence[int]], float]] = {"min": min, "max": max, "avg": fmean, "std": pstdev}
    return {name.format(key): statistic(counts) for key, statistic in statistics.items()}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
