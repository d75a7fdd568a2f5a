"""Old log-probabilities without a forward pass: interpolated between a token's sampling policy and the current one."""

from __future__ import annotations

import torch
from torch import Tensor


def interpolation_weight(versions_behind: Tensor) -> Tensor:
    """Share a of the current policy in the interpolation: 1 - 1/s after s weight updates since the token was drawn, 0
    after none. Shapes: (B, L) updates -> (B, L) float32 in [0, 1).

    AReaL's `prox_logp_method = loglinear`: a = (v - 1 - b) / (v - b), where v is the version of the weights that learn
    from the batch and b the version that drew the token, so that the old policy is one version behind v.
    """
    behind = versions_behind.float()
    return torch.where(behind > 0, 1 - 1 / behind.clamp(min=1), 0.0)


def interpolated_logprobs(drawn: Tensor, current: Tensor, weight: Tensor) -> Tensor:
    """log pi_drawn + a (log pi - log pi_drawn): linear in log-probabilities, a geometric mean of probabilities.

    Shapes: all inputs and the result (B, L); log-probabilities in nats, `weight` as `interpolation_weight` gives it.
    """
    return drawn + weight * (current - drawn)
