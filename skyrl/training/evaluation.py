"""Evaluates the policy on prompts that it is not trained on: samples them, and computes scores from several samples of
each prompt.

    mean     every sample counts: the score of one answer
    pass@k   is one of k answers right?                 best@N   the best of all N
    maj@N    is the most common answer right?

Samples of a prompt are not independent, so standard errors are clustered by prompt. 95 % confidence intervals of shares
use Wilson's score interval with an effective number of samples; those of rewards use a bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, sqrt
from pathlib import Path
from statistics import fmean

import numpy as np

from skyrl.config import GeneratorConfig
from skyrl.processes.redaction import redacted_tree
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.measures import count_failures
from skyrl.storage.atomic import atomic_folder
from skyrl.tracking.jsonlines import json_line, sample_records
from skyrl.tracking.source_labels import file_name, source_labels
from skyrl.training.describe import Metrics, mean_positive
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup
from skyrl.tree import required

Z = 1.959963984540054
"""Quantile of the normal distribution at 97.5 %."""

RESAMPLES = 10_000
"""Resamples of a bootstrap."""

_AT_ONCE = 500
"""Resamples whose indices are in memory at the same time."""


class Evaluation:
    """Samples every evaluation prompt under `eval_sampling_params` and reports scores for each data source and for
    all.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        generator: SkyRLGymGenerator,
        config: GeneratorConfig,
        *,
        batch_size: int,
        dump_folder: Path | None,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """`batch_size` is the number of prompts in flight at a time; answers are written below `dump_folder` if it is
        given.
        """
        self._prompts = prompts
        self._generator = generator
        self._sampling = required(config.eval_sampling_params, "generator.eval_sampling_params")
        self._samples = config.eval_n_samples_per_prompt
        self._batch_size = batch_size
        self._dump_folder = dump_folder
        self._decode = decode

    async def run(self, version: int) -> Metrics:
        """The metrics of `scores` under `eval/<data source>/` and `eval/all/`.

        Groups whose environment failed for good have no score: `eval/dropped_groups` counts them, and `eval/failures`,
        with its kinds, counts failed attempts if there were any.
        """
        groups = await self.sample(version)
        metrics = self.measure(groups)
        if self._dump_folder is not None:
            self.dump(self._dump_folder / f"global_step_{version}_evals", version, groups, metrics)
        return metrics

    async def sample(self, version: int) -> tuple[TrajectoryGroup, ...]:
        """A group of rewarded samples for each prompt, in order; `version` is part of the seed of each sample."""
        groups: list[TrajectoryGroup] = []
        tally = self._generator.tally(len(self._prompts) * self._samples)
        for start in range(0, len(self._prompts), self._batch_size):
            groups += await self._generator.generate(
                self._prompts[start : start + self._batch_size],
                sampling=self._sampling,
                samples_per_prompt=self._samples,
                weight_version=version,
                purpose="eval",
                tally=tally,
            )
        return tuple(groups)

    def measure(self, groups: Sequence[TrajectoryGroup]) -> Metrics:
        """The metrics that `run` returns, for groups that `sample` returned."""
        counts = count_failures(groups).items()
        failures = {name.replace("rollout/", "eval/"): count for name, count in counts if count}
        metrics: Metrics = {}
        for source, own in with_all(groups).items():
            metrics |= {f"eval/{source}/{name}": value for name, value in scores(own, self._samples).items()}
        return metrics | failures

    def dump(self, folder: Path, step: int, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        """Write every sample that has a score, one file per data source, and the metrics."""
        with atomic_folder(folder) as scratch:
            for source, own in by_source(groups).items():
                records = map(redacted_tree, sample_records(step, own, self._decode))
                (scratch / file_name(source, ".jsonl")).write_text("".join(map(json_line, records)), encoding="utf-8")
            (scratch / "aggregated_results.jsonl").write_text(json_line(metrics), encoding="utf-8")


def by_source(groups: Sequence[TrajectoryGroup]) -> dict[str, list[TrajectoryGroup]]:
    """The groups that were not dropped, in order, by the label of their data source."""
    result: dict[str, list[TrajectoryGroup]] = {}
    labels = source_labels(group.prompt.data_source for group in groups)
    for group in groups:
        if not group.dropped:
            result.setdefault(labels[group.prompt.data_source], []).append(group)
    return result


def with_all(groups: Sequence[TrajectoryGroup]) -> dict[str, list[TrajectoryGroup]]:
    """The groups by data source, and all of them together as `all`; empty if every group was dropped."""
    result = by_source(groups)
    return {**result, "all": [group for group in groups if not group.dropped]} if result else {}


def scores(groups: Sequence[TrajectoryGroup], samples: int) -> Metrics:
    """Metrics by their short names, such as `avg_score` and `pass_at_4`, for `samples` samples of each prompt.

    A sample counts as right for pass@k and maj@N if its reward is positive. Samples that stand in for failed ones
    (`failed_samples = "fill"`) are left out; a prompt with fewer than k remaining samples is left out of pass@k.
    """
    rewards = _rewards(groups)
    result = {
        "mean_positive_reward": mean_positive([row for own in _counted(groups) for row in own]),
        f"best_at_{samples}": fmean(max(own) for own in rewards),
    }
    for name, clusters in {"avg_score": rewards, **shares(groups, samples)}.items():
        mean = {name: fmean(value for cluster in clusters for value in cluster)}
        result |= mean | ({f"{name}_stderr": clustered_error(clusters)} if len(clusters) > 1 else {})
    return result


def shares(groups: Sequence[TrajectoryGroup], samples: int) -> dict[str, list[list[float]]]:
    """`accuracy`, `pass_at_<k>` and `maj_at_<samples>`, each as values between 0 and 1, one list for each prompt."""
    rewards = _rewards(groups)
    result = {"accuracy": [[float(reward == 1.0) for reward in own] for own in rewards]}
    for k in sorted({min(2**power, samples) for power in range(samples.bit_length() + 1)}):  # 1, 2, 4, ..., samples
        passed = [[pass_at_k(len(own), sum(r > 0 for r in own), k)] for own in rewards if len(own) >= k]
        result |= {f"pass_at_{k}": passed} if passed else {}
    rows = _counted(groups)
    if any(row.answer is not None for own in rows for row in own):
        result[f"maj_at_{samples}"] = [[majority([(row.answer, row.reward) for row in own])] for own in rows]
    return result


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


def share_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Bounds of the share whose estimate is the mean over all values, each between 0 and 1, one cluster per prompt.

    Wilson (1927) with n = p (1 - p) / se^2 effective samples, where se is the error clustered by prompt (design-based
    Wilson interval: Franco et al., "Comparative study of confidence intervals for proportions in complex sample
    surveys", 2019). Where se is 0, n is the number of prompts, so that a perfect score has a lower bound below 1.
    """
    share = fmean(value for cluster in clusters for value in cluster)
    error = clustered_error(clusters) if len(clusters) > 1 else 0.0
    effective = share * (1 - share) / error**2 if error > 0 else len(clusters)
    center = (share + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    half = Z / (1 + Z**2 / effective) * sqrt(share * (1 - share) / effective + Z**2 / (4 * effective**2))
    return max(0.0, center - half), min(1.0, center + half)


def clustered_error(clusters: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all values, where values of one cluster are correlated.

    Miller, "Adding error bars to evals", arXiv:2411.00640, eq. 4, times sqrt(G / (G - 1)) for G clusters, so that
    clusters of one value give the usual standard error. Needs two clusters.
    """
    count = sum(map(len, clusters))
    mean = fmean(value for cluster in clusters for value in cluster)
    squares = sum(sum(value - mean for value in cluster) ** 2 for cluster in clusters)
    return sqrt(squares * len(clusters) / (len(clusters) - 1)) / count


def mean_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Bounds of the mean over all values, one cluster per prompt: prompts are drawn with replacement (Efron 1979), and
    the bounds are the 2.5th and 97.5th percentile of 10,000 such means, the same ones in every call.
    """
    sums, counts = np.array([sum(cluster) for cluster in clusters]), np.array([len(cluster) for cluster in clusters])
    random = np.random.default_rng(0)
    means = []
    for start in range(0, RESAMPLES, _AT_ONCE):
        resampled = random.integers(len(clusters), size=(min(_AT_ONCE, RESAMPLES - start), len(clusters)))
        means.append(sums[resampled].sum(1) / counts[resampled].sum(1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
