"""One rank's part in the metrics of a mini-batch, so that all ranks together give exactly those of the mini-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

Metrics = dict[str, float]

SPREAD = frozenset({"rollout_train_logprobs_abs_diff", "critic_values", "is_ratio", "cispo/ratio", "behave_weight"})
"""Numbers per token of which extremes and standard deviation are logged besides the mean."""


@frozen(kw_only=True)
class Moments:
    """Count, mean, sum of squared deviations and extremes of numbers, in double precision."""

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    """Sum of squared distances from the mean."""

    largest: float = -math.inf
    smallest: float = math.inf

    @classmethod
    def from_tensor(cls, values: Tensor) -> Moments:
        """Moments of the elements of a tensor of any shape."""
        if not values.numel():
            return cls()
        exact = values.detach().double()
        mean = exact.mean()
        return cls(
            count=exact.numel(),
            mean=mean.item(),
            deviation=(exact - mean).square().sum().item(),
            largest=exact.max().item(),
            smallest=exact.min().item(),
        )

    def __add__(self, other: Moments) -> Moments:
        """Moments of the numbers of both (Chan, Golub and LeVeque, 1979: the update of pairwise variance)."""
        count = self.count + other.count
        if not count:
            return self
        distance = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + distance * other.count / count,
            deviation=self.deviation + other.deviation + distance**2 * self.count * other.count / count,
            largest=max(self.largest, other.largest),
            smallest=min(self.smallest, other.smallest),
        )

    def spread(self) -> dict[str, float]:
        """Mean, extremes and standard deviation, by name; all 0 of no numbers at all."""
        least, most = (self.smallest, self.largest) if self.count else (0.0, 0.0)
        return {"mean": self.mean, "max": most, "min": least, "std": self.std}

    @property
    def std(self) -> float:
        """Standard deviation of the numbers themselves, not an estimate from a sample."""
        return math.sqrt(self.deviation / self.count) if self.count else 0.0


@frozen(kw_only=True)
class RankMetrics:
    """One rank's part in an optimizer step."""

    sums: Metrics
    """Add up over micro-batches and ranks."""

    moments: dict[str, Moments]
    """Moments of numbers per token."""

    shared: Metrics
    """Metrics that are the same on every rank: gradient norm, learning rate."""

    def metrics(self) -> Metrics:
        """Metrics by the names they are logged under."""
        means = {name: moments.mean for name, moments in self.moments.items() if name not in SPREAD}
        spreads = {
            f"{name}_{kind}": value
            for name, moments in self.moments.items()
            if name in SPREAD
            for kind, value in moments.spread().items()
        }
        return self.sums | self.shared | means | spreads


def merged(parts: Sequence[RankMetrics]) -> RankMetrics:
    """The metrics of all ranks together."""
    first = parts[0]
    return RankMetrics(
        sums={name: math.fsum(part.sums[name] for part in parts) for name in first.sums},
        moments={name: sum((part.moments[name] for part in parts), Moments()) for name in first.moments},
        shared=first.shared,
    )


def added(one: Metrics, other: Metrics) -> Metrics:
    """Sums name by name; a name that only one side has keeps its value."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}
