"""Adjustments of rewards and advantages: scale, bounds, the length penalty, and shifting and scaling numbers by their
own mean and deviation, each taken over the batch or over a group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from skyrl.algorithms.groups import Groups

Level = Literal["batch", "group"]


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


def normalize(
    values: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    mean_level: Level | None,
    std_level: Level | None,
    leave_one_out: bool,
    unbiased: bool,
    eps: float,
) -> Tensor:
    """(x - mu) / (sigma + eps); no shift if `mean_level` is None, no division if `std_level` is None.

    sigma^2 is the mean of (x - mu)^2 at `std_level`, and mu the mean at `mean_level`: with group and batch, sigma is
    the deviation of the group-centred numbers (Lite PPO, arXiv:2508.08221). `leave_one_out` takes mu over the others,
    (S - x) / (n - 1), and `unbiased` divides squares by n - 1. The options are those of AReaL's NormConfig. A single
    number is its own mean, also with `leave_one_out`, and its deviation counts as 1. If all numbers at `mean_level` are
    equal, they become 0.

    Shapes: `values`, `groups` and `mask` (N,), numbers, integers and bool; the result (N,), 0 outside the mask.
    """
    result = torch.zeros_like(values)
    chosen, own = values[mask], groups[mask]
    if not len(chosen):
        return result
    levels: dict[Level | None, Groups] = {"group": Groups.of(own), "batch": Groups.of(torch.zeros_like(own))}
    centered = chosen.double()
    if mean_level is not None:
        others = levels[mean_level]
        centered = others.centered(chosen)
        if leave_one_out:
            centered = centered * others.spread(others.count / (others.count - 1).clamp(min=1))
    if std_level is not None:
        within = levels[std_level]
        count = within.count - 1 if unbiased else within.count
        variance = within.sum(centered.square()) / count.clamp(min=1)
        deviation = torch.where(within.count == 1, 1.0, variance.sqrt())
        centered = centered / (within.spread(deviation) + eps)
    result[mask] = centered.to(values.dtype)
    return result
