"""Estimates of KL(pi || pi_ref) from one sample (http://joschu.net/blog/kl-approx.html), and controllers of the weight
of a KL penalty over a run.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) at tokens drawn from pi, in nats.

    With d = log pi_ref - log pi: k1 is -d (unbiased, may be negative), k2 is d^2 / 2, k3 is e^d - d - 1 (unbiased and
    never negative), abs is |d|. k3 clamps d to +-20 and its value to at most 10, as SkyRL does. Shapes: both inputs
    and the result (B, L).
    """
    difference = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            bounded = difference.clamp(-20.0, 20.0)
            return (torch.expm1(bounded) - bounded).clamp(max=10.0)
        case "abs":
            return difference.abs()


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
