"""Advantage formulas that turn one score per answer into one advantage per answer.

Every function takes `scores` (B,), the return of each answer, and `groups` (B,), integers that are equal where two
answers belong to the same prompt, in any order of rows; the result is (B,), of the type of `scores`. Each docstring
says what the answers of a group with nothing to compare get. Advantages of tokens are in `returns.py` and
`estimators.py`. All raise ValueError, naming the argument, for shapes that differ and for scores that are not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.groups import Groups
from skyrl.algorithms.shapes import expect_finite, expect_same_shape


def group_relative(scores: Tensor, groups: Tensor, *, normalize_by_std: bool) -> Tensor:
    """(s_i - mean_G) / (std_G + 1e-6) over the group G of each answer; no division if `normalize_by_std` is off.

    GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the division it is Dr. GRPO, arXiv:2503.20783. The
    standard deviation is the unbiased one. In a group of one, the mean counts as 0 and the deviation as 1, so that the
    advantage is the score. A group whose scores are all equal gets zeros. Shapes: `scores` and `groups` (B,), the
    result (B,).
    """
    known = _compared(scores, groups)
    centered = torch.where(known.is_single(), scores.double(), known.centered(scores))
    if not normalize_by_std:
        return centered.to(scores.dtype)
    variance = known.sum(known.centered(scores).square()) / (known.count - 1).clamp(min=1)
    deviation = torch.where(known.count == 1, 1.0, variance.sqrt())
    return (centered / (known.spread(deviation) + 1e-6)).to(scores.dtype)


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """s_i minus the mean of the other answers of its group, which is (s_i - mean_G) n / (n - 1).

    RLOO, arXiv:2402.14740. A group of one gets 0: there is no other answer. Shapes: `scores` and `groups` (B,), the
    result (B,).
    """
    known = _compared(scores, groups)
    factor = known.count / (known.count - 1).clamp(min=1)
    return (known.centered(scores) * known.spread(factor)).to(scores.dtype)


def relative_to_mean(scores: Tensor, groups: Tensor) -> Tensor:
    """(s_i - mean_G) / (mean_G + 1e-6): the rarer success is, the more it counts.

    MaxRL, arXiv:2602.02710: with rewards of 0 and 1 it follows log p, the log-likelihood of success, whose series in
    powers of 1 - p is truncated at the number of samples of a group. A group of one gets its score. Intended for
    rewards that are not negative: advantages are unbounded if the mean of a group is near -1e-6. Shapes: `scores` and
    `groups` (B,), the result (B,).
    """
    known = _compared(scores, groups)
    relative = known.centered(scores) / (known.spread(known.mean(scores)) + 1e-6)
    return torch.where(known.is_single(), scores.double(), relative).to(scores.dtype)


def less_the_group_mean(scores: Tensor, groups: Tensor) -> Tensor:
    """s_i - mean_G, which REINFORCE++-baseline whitens over the tokens of the batch, arXiv:2501.03262.

    A group of one keeps its score, since its own reward is no baseline. Shapes: `scores` and `groups` (B,), the result
    (B,).
    """
    return group_relative(scores, groups, normalize_by_std=False)


def less_the_greedy_score(scores: Tensor, baselines: Tensor) -> Tensor:
    """s_i minus the score of the greedy answer to the same prompt, `baselines` (B,). ReMax, arXiv:2310.10505."""
    expect_same_shape(scores=scores, baselines=baselines)
    expect_finite(scores=scores, baselines=baselines)
    return scores - baselines


def length_weighted(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """s_i minus the mean of its group weighted by length, sum(l s) / sum(l): the baseline of least variance if the
    squared norm of an answer's gradient grows with its length.

    OPO, arXiv:2505.23585. `lengths` (B,) counts the tokens that are trained on. A group of one keeps its score; a group
    whose scores are all equal, or that has no such token, gets zeros.
    """
    known = _compared(scores, groups)
    tokens = known.sum(lengths)
    baseline = known.sum(scores.double() * lengths) / tokens.clamp(min=1)
    nothing = (known.range(scores) == 0) | known.spread(tokens == 0)
    advantages = torch.where(nothing, 0.0, scores.double() - known.spread(baseline))
    return torch.where(known.is_single(), scores.double(), advantages).to(scores.dtype)


def rescaled_for_silent_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """alpha (s_i - mean_G) with alpha = B / (B - M), where M answers are in groups whose scores are all equal.

    GPG, arXiv:2504.02546, with the normaliser 1: alpha makes up for the answers that have no gradient. A group of one
    keeps its score, times alpha, and does not count in M. Shapes: `scores` and `groups` (B,), the result (B,).
    """
    known = _compared(scores, groups)
    speaking = ((known.range(scores) > 0) | known.is_single()).sum()
    centered = torch.where(known.is_single(), scores.double(), known.centered(scores))
    return (centered * len(scores) / speaking.clamp(min=1)).to(scores.dtype)


def broadcast_last_advantage(advantages: Tensor, trajectories: Tensor, last: Tensor) -> Tensor:
    """Gives every row of a trajectory the advantage of its last row, for batches with one row per turn.

    Shapes: `advantages` (B,), `trajectories` (B,) integers, equal for the rows of one trajectory, `last` (B,) bool.
    Raises ValueError unless each trajectory has exactly one last row.
    """
    known = Groups.of(trajectories)
    if not torch.equal(known.sum(last), torch.ones_like(known.count)):
        raise ValueError("last: every trajectory needs exactly one last row")
    return known.spread(known.sum(torch.where(last, advantages, 0.0))).to(advantages.dtype)


def _compared(scores: Tensor, groups: Tensor) -> Groups:
    expect_same_shape(scores=scores, groups=groups)
    expect_finite(scores=scores)
    return Groups.of(groups)
