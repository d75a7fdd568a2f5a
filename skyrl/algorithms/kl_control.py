"""Controllers of the weight of a KL penalty over a run."""

from __future__ import annotations

from typing import Protocol


class KLController(Protocol):
    """The current weight of a KL penalty, which may adapt to measured divergences."""

    value: float
    """Weight of the penalty."""

    def update(self, divergence: float, samples: int) -> None:
        """Adapt the weight to the mean divergence per token, in nats, of a batch of `samples` answers."""


class FixedKLController:
    """A constant weight of a KL penalty."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, divergence: float, samples: int) -> None:
        """Does nothing: the weight is constant."""


class AdaptiveKLController:
    """beta <- beta (1 + clip(KL / target - 1, +-0.2) n / horizon): rises while the divergence is above the target.

    Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, value: float, *, target: float, horizon: int) -> None:
        self.value, self._target, self._horizon = value, target, horizon

    def update(self, divergence: float, samples: int) -> None:
        """Apply the formula once, with n = `samples` and KL = `divergence`."""
        error = min(max(divergence / self._target - 1, -0.2), 0.2)
        self.value *= 1 + error * samples / self._horizon
