"""How much better an answer was than expected: one score per answer -> one advantage per answer.

Every function takes `scores` (B,), the return of each answer, and `groups` (B,), integers that are equal where two
answers belong to the same prompt, in any order of rows; the result is (B,), of the type of `scores`. Where a group has
nothing to compare, the docstring says what its answers get. What each token gets is in `returns.py` and
`estimators.py`. All raise ValueError, naming the argument, for shapes that differ and for scores that are not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.groups import Groups
from skyrl.algorithms.shapes import expect_finite, expect_same_shape


def group_relative(scores: Tensor, groups: Tensor, *, normalize_by_std: bool) -> Tensor:
    """(s_i - mean_G) / (std_G + 1e-6) over the group G of each answer; without the division if `normalize_by_std` is
    off.

    GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the division it is Dr. GRPO, arXiv:2503.20783. The
    standard deviation is the unbiased one. A group of one has nothing to be compared with: its mean counts as 0 and
    its deviation as 1, so that the advantage is its score. A group whose scores are all equal gets zeros. Shapes:
    `scores` and `groups` (B,), the result (B,).
    """
    known = _compared(scores, groups)
    centered = torch.where(known.alone(), scores.double(), known.centered(scores))
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

    MaxRL, arXiv:2602.02710: with rewards of 0 and 1 this follows the log-likelihood of success, log p, its series in
    powers of 1 - p being cut off where the samples of a group end. A group of one gets its score. Meant for rewards
    that are not negative: where the mean of a group is near -1e-6, advantages have no bound. Shapes: `scores` and
    `groups` (B,), the result (B,).
    """
    known = _compared(scores, groups)
    relative = known.centered(scores) / (known.spread(known.mean(scores)) + 1e-6)
    return torch.where(known.alone(), scores.double(), relative).to(scores.dtype)


def less_the_group_mean(scores: Tensor, groups: Tensor) -> Tensor:
    """s_i - mean_G: what REINFORCE++-baseline whitens over the tokens of the batch, arXiv:2501.03262.

    A group of one keeps its score, since its own reward says nothing about what was to be expected. Shapes: `scores`
    and `groups` (B,), the result (B,).
    """
    return group_relative(scores, groups, normalize_by_std=False)


def less_the_greedy_score(scores: Tensor, baselines: Tensor) -> Tensor:
    """s_i minus the score of the greedy answer to the same prompt, `baselines` (B,). ReMax, arXiv:2310.10505."""
    expect_same_shape(scores=scores, baselines=baselines)
    expect_finite(scores=scores, baselines=baselines)
    return scores - baselines


def length_weighted(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """s_i minus the mean of its group weighted by length, sum(l s) / sum(l): the baseline of least variance where the
    squared norm of an answer's gradient grows with its tokens.

    OPO, arXiv:2505.23585. `lengths` (B,) are tokens that are trained on. A group of one keeps its score, one
    whose scores are all equal, or that has no token, gets zeros.
    """
    known = _compared(scores, groups)
    tokens = known.sum(lengths)
    baseline = known.sum(scores.double() * lengths) / tokens.clamp(min=1)
    nothing = (known.range(scores) == 0) | known.spread(tokens == 0)
    advantages = torch.where(nothing, 0.0, scores.double() - known.spread(baseline))
    return torch.where(known.alone(), scores.double(), advantages).to(scores.dtype)


def rescaled_for_silent_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """alpha (s_i - mean_G) with alpha = B / (B - M), M answers being in groups whose scores are all equal.

    GPG, arXiv:2504.02546, with the normaliser 1: alpha makes up for the answers that have no gradient. Where all
    groups are silent everything is 0. A group of one keeps its score, and is not silent. Shapes: `scores` and `groups`
    (B,), the result (B,).
    """
    known = _compared(scores, groups)
    speaking = ((known.range(scores) > 0) | known.alone()).sum()
    centered = torch.where(known.alone(), scores.double(), known.centered(scores))
    return (centered * len(scores) / speaking.clamp(min=1)).to(scores.dtype)


def of_the_last_step(advantages: Tensor, trajectories: Tensor, last: Tensor) -> Tensor:
    """Where each turn is a row of its own: every row of a trajectory gets what was found for its last one.

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
