"""A critic: the loss of its values, and the running scale of returns by which its targets are normalized."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

DECAY = 0.99
"""Factor that each update multiplies the old running means by."""

LEAST_VARIANCE = 1e-2
"""Lower bound on the variance, as in MAPPO: equal returns have a variance of 0."""


@frozen(kw_only=True)
class ReturnScale:
    """Exponential running means of returns and of their squares, with Adam's correction for the first updates.

    Value normalization as in MAPPO (arXiv:2103.01955, section 5.1; PopArt, arXiv:1602.07714, without its correction of
    the output layer).
    """

    first: float = 0.0
    """Running mean of returns, uncorrected."""

    second: float = 0.0
    """Running mean of squared returns, uncorrected."""

    weight: float = 0.0
    """Sum of the weights in both, 0 before the first update and almost 1 after many."""

    def updated(self, returns: Tensor) -> ReturnScale:
        """The scale updated with the returns (N,) of a mini-batch; unchanged if it has none or any is not finite."""
        exact = returns.double()
        if not exact.numel() or not exact.isfinite().all():
            return self
        return ReturnScale(
            first=DECAY * self.first + (1 - DECAY) * exact.mean().item(),
            second=DECAY * self.second + (1 - DECAY) * exact.square().mean().item(),
            weight=DECAY * self.weight + (1 - DECAY),
        )

    @property
    def mean(self) -> float:
        """Mean of the returns; 0 before there are any."""
        return self.first / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the returns, at least 0.1; 1 before there are any."""
        return math.sqrt(max(self.second / self.weight - self.mean**2, LEAST_VARIANCE)) if self.weight else 1.0

    def normalized(self, values: Tensor) -> Tensor:
        """(x - mean) / std, for a tensor of any shape."""
        return (values - self.mean) / self.std

    def restored(self, values: Tensor) -> Tensor:
        """x std + mean, for a tensor of any shape."""
        return values * self.std + self.mean

    @classmethod
    def of(cls, state: Mapping[str, float]) -> ReturnScale:
        """The scale restored from the dictionary that `attrs.asdict` made of it."""
        return cls(first=float(state["first"]), second=float(state["second"]), weight=float(state["weight"]))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is set, and 0 elsewhere; both (B, L)."""
    return torch.where(mask, values, 0.0)


def value_loss(values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error 1/2 (V - R)^2 of each token, or, with `clip`, the larger of it and the same error of V
    clamped to within `clip` of `old_values`.

    PPO's reference implementation (openai/baselines, ppo2), where the clipped term keeps one batch from moving a value
    far. Shapes: all inputs and the result (B, L); `old_values` are read with `clip` only.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    return 0.5 * torch.maximum(error, (_clipped_values(values, old_values, clip) - returns).square())


def value_is_clipped(values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None) -> Tensor:
    """Bool (B, L): whether the clipped term of `value_loss` is the larger one, so that the value has no gradient."""
    if clip is None:
        return torch.zeros_like(values, dtype=torch.bool)
    return (_clipped_values(values, old_values, clip) - returns).square() > (values - returns).square()


def _clipped_values(values: Tensor, old_values: Tensor | None, clip: float) -> Tensor:
    assert old_values is not None, "clipping needs the values before the update"
    return old_values + (values - old_values).clamp(-clip, clip)
