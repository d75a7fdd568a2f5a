"""Scores of an evaluation: metrics of a policy from several samples of each prompt.

    mean     every sample counts: the score of one answer
    pass@k   is one of k answers right?                 best@N   the best of all N
    maj@N    is the most common answer right?

Samples of a prompt are not independent, so standard errors are clustered by prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from statistics import fmean

from skyrl.training.describe import mean_positive
from skyrl.training.intervals import clustered_error, mean_interval, share_interval
from skyrl.trajectory import Trajectory, TrajectoryGroup

Metrics = dict[str, float]


def scores(groups: Sequence[TrajectoryGroup], samples: int) -> Metrics:
    """Metrics by their short names, such as `avg_score` and `pass_at_4`, for `samples` samples of each prompt.

    A sample counts as right for pass@k and maj@N if its reward is positive. Samples that stand in for failed ones
    (`failed_samples = "fill"`) are left out; a prompt with fewer than k remaining samples is left out of pass@k.
    """
    rewards = _rewards(groups)
    found = {
        "mean_positive_reward": mean_positive([row for own in _counted(groups) for row in own]),
        f"best_at_{samples}": fmean(max(own) for own in rewards),
    }
    for name, clusters in {"avg_score": rewards, **shares(groups, samples)}.items():
        mean = {name: fmean(value for cluster in clusters for value in cluster)}
        found |= mean | ({f"{name}_stderr": clustered_error(clusters)} if len(clusters) > 1 else {})
    return found


def shares(groups: Sequence[TrajectoryGroup], samples: int) -> dict[str, list[list[float]]]:
    """`accuracy`, `pass_at_<k>` and `maj_at_<samples>`, each as values between 0 and 1, one list for each prompt."""
    rewards = _rewards(groups)
    found = {"accuracy": [[float(reward == 1.0) for reward in own] for own in rewards]}
    for k in _powers_of_two(samples):
        passed = [[pass_at_k(len(own), sum(r > 0 for r in own), k)] for own in rewards if len(own) >= k]
        found |= {f"pass_at_{k}": passed} if passed else {}
    rows = _counted(groups)
    if any(row.answer is not None for own in rows for row in own):
        found[f"maj_at_{samples}"] = [[majority([(row.answer, row.reward) for row in own])] for own in rows]
    return found


def intervals(groups: Sequence[TrajectoryGroup], samples: int) -> dict[str, tuple[float, float]]:
    """95 % confidence intervals of `avg_score` and of every share, under the names that `scores` uses."""
    bounds = {name: share_interval(clusters) for name, clusters in shares(groups, samples).items()}
    return {"avg_score": mean_interval(_rewards(groups)), **bounds}


def _counted(groups: Sequence[TrajectoryGroup]) -> list[list[Trajectory]]:
    """The samples of each prompt without copies that stand in for others; prompts without samples are left out."""
    rows = ([row for row in group.trajectories if not row.filled] for group in groups)
    return [own for own in rows if own]


def _rewards(groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
    return [[row.reward for row in own] for own in _counted(groups)]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, include a right one: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al., "Evaluating large language models trained on code", arXiv:2107.03374, eq. 1.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority(votes: Sequence[tuple[str | None, float]]) -> float:
    """Share of right samples among those that gave the most common answer (self-consistency, arXiv:2203.11171).

    Each vote is an answer and its reward. Answers that are equally common count alike; samples without an answer do not
    vote, and a prompt without votes gets 0.
    """
    by_answer: dict[str, list[float]] = {}
    for answer, reward in votes:
        if answer is not None:
            by_answer.setdefault(answer, []).append(float(reward > 0))
    most = max(map(len, by_answer.values()), default=0)
    return fmean(fmean(right) for right in by_answer.values() if len(right) == most) if most else 0.0


def _powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4, ... below `most`, then `most` itself."""
    k = 1
    while k < most:
        yield k
        k *= 2
    yield most
