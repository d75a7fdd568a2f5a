"""Old log-probabilities without a pass: interpolated between the policy that drew a token and the current one."""

from __future__ import annotations

import torch
from torch import Tensor


def interpolation_weight(versions_behind: Tensor) -> Tensor:
    """(B, L) updates of the weights since a token was drawn -> (B, L) float32 in [0, 1): the share a of the current
    policy in the interpolation, 1 - 1/s for s updates, and 0 for none.

    AReaL's `prox_logp_method = loglinear`: a = (v - 1 - b) / (v - b) for the version v of the weights that the batch is
    learned with and b of those that drew the token, so that the old policy is one version behind v.
    """
    behind = versions_behind.float()
    return torch.where(behind > 0, 1 - 1 / behind.clamp(min=1), 0.0)


def interpolated_logprobs(drawn: Tensor, current: Tensor, weight: Tensor) -> Tensor:
    """log pi_drawn + a (log pi - log pi_drawn): linear in log-probabilities, a geometric mean of probabilities.

    Shapes: all inputs and the result (B, L); log-probabilities in nats, `weight` as `interpolation_weight` gives it.
    """
    return drawn + weight * (current - drawn)
