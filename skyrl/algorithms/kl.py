"""Estimates of KL(pi || pi_ref) from one sample: http://joschu.net/blog/kl-approx.html."""

from __future__ import annotations

from typing import Literal

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
