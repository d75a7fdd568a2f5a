"""How much better an answer was than expected: from rewards to advantages."""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative(scores: Tensor, groups: Tensor, *, normalize_by_std: bool) -> Tensor:
    """(s_i - mean_G) / (std_G + 1e-6) over the group G of each answer; without the division if `normalize_by_std` is
    off.

    GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the division it is Dr. GRPO, arXiv:2503.20783. The
    standard deviation is the unbiased one. A group of one has nothing to be compared with: its mean counts as 0 and
    its deviation as 1, so that the advantage is its score. A group whose scores are all equal gets zeros.

    Shapes: `scores` (B,) float, `groups` (B,) integers, equal where two answers belong together in any order of rows;
    the result (B,).
    """
    _, member_of = torch.unique(groups, return_inverse=True)
    exact = scores.double()
    count = torch.bincount(member_of).double()
    mean = torch.zeros_like(count).index_add_(0, member_of, exact) / count
    mean = torch.where(count == 1, 0.0, mean)
    centered = torch.where(_is_constant(exact, member_of, count), 0.0, exact - mean[member_of])
    if not normalize_by_std:
        return centered.to(scores.dtype)
    squares = torch.zeros_like(count).index_add_(0, member_of, centered.square())
    std = torch.where(count == 1, 1.0, (squares / (count - 1).clamp(min=1)).sqrt())
    return (centered / (std[member_of] + 1e-6)).to(scores.dtype)


def _is_constant(scores: Tensor, member_of: Tensor, count: Tensor) -> Tensor:
    """(B,) bool: does the answer's group, of two or more, have one score only? Rounding would leave it a tiny
    advantage.
    """
    highest = torch.full_like(count, -torch.inf).scatter_reduce_(0, member_of, scores, "amax")
    lowest = torch.full_like(count, torch.inf).scatter_reduce_(0, member_of, scores, "amin")
    return ((highest == lowest) & (count > 1))[member_of]
