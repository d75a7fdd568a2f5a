"""What a critic's values cost: how far they are from the returns."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error 1/2 (V - R)^2 of each token, or, with `clip`, the larger of it and the same of V held to
    within `clip` of `old_values`.

    PPO's reference implementation (openai/baselines, ppo2), where the clipped term keeps one batch from moving a value
    far. Shapes: all inputs and the result (B, L); `old_values` are read with `clip` only.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    assert old_values is not None, "clipping needs the values before the update"
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(error, (held - returns).square())
