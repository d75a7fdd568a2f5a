"""Losses of a critic: the distance of its values from the returns."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error 1/2 (V - R)^2 of each token, or, with `clip`, the larger of it and the same error of V
    clamped to within `clip` of `old_values`.

    PPO's reference implementation (openai/baselines, ppo2), where the clipped term keeps one batch from moving a value
    far. Shapes: all inputs and the result (B, L); `old_values` are read with `clip` only.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    return 0.5 * torch.maximum(error, (_held(values, old_values, clip) - returns).square())


def value_is_clipped(values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None) -> Tensor:
    """Bool (B, L): whether the clipped term of `value_loss` is the larger one, so that the value has no gradient."""
    if clip is None:
        return torch.zeros_like(values, dtype=torch.bool)
    return (_held(values, old_values, clip) - returns).square() > (values - returns).square()


def _held(values: Tensor, old_values: Tensor | None, clip: float) -> Tensor:
    assert old_values is not None, "clipping needs the values before the update"
    return old_values + (values - old_values).clamp(-clip, clip)
