"""Adjustments of an answer's reward before advantages are computed: scale, bounds, and the length penalty."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(rewards: Tensor, *, bias: float, scale: float, clip: float | None) -> Tensor:
    """(r + bias) * scale, clamped to [-clip, clip]; not clamped if `clip` is None. Shapes: (B,) to (B,)."""
    changed = (rewards + bias) * scale
    return changed if clip is None else changed.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, factor: float, floor: bool) -> Tensor:
    """The addition to the reward of a long answer: 0 up to `longest - buffer` tokens, then falling linearly to -factor
    at `longest`. Beyond `longest` it stays at -factor with `floor`, and keeps falling without.

    The soft overlong punishment of DAPO, arXiv:2503.14476, eq. 13, has the floor; AReaL's has none. Shapes: `lengths`
    (B,) tokens of each answer, the result (B,) float32, never positive.
    """
    over = (lengths - (longest - buffer)).clamp(min=0).float() / buffer
    return -factor * (over.clamp(max=1.0) if floor else over)


def less_the_divergence(rewards: Tensor, divergence: Tensor, mask: Tensor, *, weight: float) -> Tensor:
    """r_t - weight * KL_t at the selected tokens: the penalty of RLHF, arXiv:1909.08593, eq. 2.

    A weight below 0 counts as 0. Shapes: all (B, L), `mask` bool; rewards outside the mask are unchanged.
    """
    return rewards - max(weight, 0.0) * torch.where(mask, divergence, 0.0)


def added_at(rewards: Tensor, extra: Tensor, at: Tensor) -> Tensor:
    """Rewards at tokens, with `extra` (B,) added at column `at` (B,) int64 of each row. Shapes: (B, L) to (B, L)."""
    return rewards.scatter_add(1, at.unsqueeze(1), extra.unsqueeze(1))
