"""Shifting and scaling numbers by their own mean and deviation, each taken over the batch or over a group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from skyrl.algorithms.groups import Groups

Level = Literal["batch", "group"]


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
        centered = _centered(chosen, levels[mean_level], leave_one_out)
    if std_level is not None:
        within = levels[std_level]
        count = within.count - 1 if unbiased else within.count
        variance = within.sum(centered.square()) / count.clamp(min=1)
        deviation = torch.where(within.count == 1, 1.0, variance.sqrt())
        centered = centered / (within.spread(deviation) + eps)
    result[mask] = centered.to(values.dtype)
    return result


def _centered(values: Tensor, within: Groups, leave_one_out: bool) -> Tensor:
    centered = within.centered(values)
    if not leave_one_out:
        return centered
    return centered * within.spread(within.count / (within.count - 1).clamp(min=1))
