"""Standard errors and 95 % confidence intervals of an evaluation whose samples of one prompt are not independent.

Shares use Wilson's score interval with an effective number of samples; rewards use a bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

import numpy as np

Z = 1.959963984540054
"""Quantile of the normal distribution at 97.5 %."""

RESAMPLES = 10_000
"""Resamples of a bootstrap."""


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


def mean_interval(clusters: Sequence[Sequence[float]], *, seed: int = 0) -> tuple[float, float]:
    """Bounds of the mean over all values, one cluster per prompt: prompts are drawn with replacement (Efron 1979), and
    the bounds are the 2.5th and 97.5th percentile of 10,000 such means. `seed` determines the draws.
    """
    sums, counts = np.array([sum(cluster) for cluster in clusters]), np.array([len(cluster) for cluster in clusters])
    random = np.random.default_rng(seed)
    means = []
    for start in range(0, RESAMPLES, _AT_ONCE):
        drawn = random.integers(len(clusters), size=(min(_AT_ONCE, RESAMPLES - start), len(clusters)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


_AT_ONCE = 500
"""Resamples whose indices are in memory at the same time."""
