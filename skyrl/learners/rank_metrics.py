"""Metrics of one rank, in a form from which the exact metrics of the whole mini-batch can be merged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from attrs import frozen
from torch import Tensor

from skyrl.learners.routing import Loads, load_metrics

Metrics = dict[str, float]

SPREAD = frozenset({"rollout_train_logprobs_abs_diff", "critic_values", "is_ratio", "cispo/ratio", "behave_weight"})
"""Names of per-token metrics for which extremes and standard deviation are logged besides the mean."""


@frozen
class Moments:
    """Count, mean, sum of squared deviations and extremes of numbers, in double precision."""

    count: float = 0
    mean: float = 0.0
    deviation: float = 0.0
    """Sum of squared distances from the mean."""

    largest: float = -math.inf
    smallest: float = math.inf

    @classmethod
    def from_tensor(cls, values: Tensor) -> Moments:
        """Moments of the elements of a tensor of any shape."""
        return cls(values.numel(), *_moments(values).tolist()) if values.numel() else cls()

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

    def times(self, factor: float) -> Moments:
        """Moments of numbers of which each counts `factor` times."""
        return attrs.evolve(self, count=self.count * factor, deviation=self.deviation * factor)

    def spread(self) -> dict[str, float]:
        """Mean, extremes and standard deviation, by name; all 0 if there are no numbers."""
        least, most = (self.smallest, self.largest) if self.count else (0.0, 0.0)
        return {"mean": self.mean, "max": most, "min": least, "std": self.std}

    @property
    def std(self) -> float:
        """Population standard deviation, not an estimate from a sample."""
        return math.sqrt(self.deviation / self.count) if self.count else 0.0


@frozen(kw_only=True)
class RankMetrics:
    """One rank's metrics of a forward and backward pass."""

    sums: Metrics
    """Metrics that add up over micro-batches and ranks."""

    moments: dict[str, Moments]
    """Moments of numbers per token."""

    loads: Loads = ()
    """Tokens that chose each expert of a mixture of experts; add up over micro-batches and ranks."""

    def merged_with(self, measured_only: Sequence[Mapping[str, Moments]], factor: float) -> RankMetrics:
        """These metrics with the moments of rows that were only measured, each of which counts `factor` times."""
        moments = dict(self.moments)
        for part in measured_only:
            moments |= {name: moments.get(name, Moments()) + item.times(factor) for name, item in part.items()}
        return attrs.evolve(self, moments=moments)

    def metrics(self) -> Metrics:
        """Metrics by the names they are logged under."""
        means = {name: moments.mean for name, moments in self.moments.items() if name not in SPREAD}
        spreads = {
            f"{name}_{kind}": value
            for name, moments in self.moments.items()
            if name in SPREAD
            for kind, value in moments.spread().items()
        }
        return self.sums | means | spreads | load_metrics(self.loads)


def merge_metrics(parts: Sequence[RankMetrics]) -> RankMetrics:
    """The metrics of all ranks together."""
    first = parts[0]
    return RankMetrics(
        sums={
            name: math.fsum(part.sums.get(name, 0.0) for part in parts)
            for name in dict.fromkeys(name for part in parts for name in part.sums)
        },
        moments={name: sum((part.moments[name] for part in parts), Moments()) for name in first.moments},
        loads=tuple(
            tuple(sum(counts) for counts in zip(*layers, strict=True))
            for layers in zip(*(part.loads for part in parts), strict=True)
        ),
    )


class Measurements:
    """Measurements of the micro-batches of a pass. They stay on the device until they are read in one
    transfer, so that the host does not wait for the device in between.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[str, Tensor]] = []
        self._numbers: list[tuple[str, int, Tensor]] = []  # name, count and `_moments`
        self._loads: list[Tensor] = []  # their sum

    def add(self, parts: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> None:
        """Add one micro-batch: scalar parts of the loss, and per-token metrics, tensors of any shape, by name."""
        self._parts += [(name, value.detach().double().reshape(1)) for name, value in parts.items()]
        self._numbers += [(name, values.numel(), _moments(values)) for name, values in numbers.items()]

    def has(self, name: str) -> bool:
        """Whether a part of the loss of this name was added."""
        return any(item == name for item, _ in self._parts)

    def add_loads(self, loads: Tensor) -> None:
        """Add the number of tokens of one micro-batch that chose each expert, (layers, E)."""
        self._loads = [sum(self._loads, loads.detach().double())]

    def read(self) -> tuple[Metrics, dict[str, Moments], Loads]:
        """The sums of the parts, the moments of the numbers, and the loads, over all micro-batches in order."""
        sums: Metrics = {}
        result: dict[str, Moments] = {}
        tensors = [part for _, part in self._parts] + [rest for _, _, rest in self._numbers] + self._loads
        values = iter(to_host(tensors))
        for (name, _), part in zip(self._parts, values, strict=False):
            sums[name] = sums.get(name, 0.0) + part.item()
        for (name, count, _), rest in zip(self._numbers, values, strict=False):
            own = Moments(count, *rest.tolist()) if count else Moments()
            result[name] = result.get(name, Moments()) + own
        return sums, result, tuple(tuple(layer) for loads in values for layer in loads.tolist())


def _moments(values: Tensor) -> Tensor:
    """(4,) float64 of a tensor of any shape: mean, sum of squared deviations, largest and smallest; 0 if empty."""
    exact = values.detach().double()
    if not values.numel():
        return exact.new_zeros(4)
    mean = exact.mean()
    return torch.stack([mean, (exact - mean).square().sum(), exact.max(), exact.min()])


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of any shapes and one type in host memory; tensors on a device come in one transfer."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
