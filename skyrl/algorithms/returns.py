"""Credit over time: from rewards at tokens to returns and advantages at tokens.

A state is one in which the policy drew a token, so the recursions go from selected token to selected token and skip
what the environment or the template put between them: discounts count the policy's own tokens, a later turn's reward
reaches the turns before it, and a critic is never asked about a token that the policy did not choose. A teacher gives
credit at every token, by how much more probable it finds the token that the student sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.shapes import expect_finite, expect_same_shape


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_u, where u is the next selected token of the row; 0 outside the mask.

    Rewards outside the mask are ignored: collating puts each on a selected token. Shapes: `rewards` (B, L), `mask`
    (B, L) bool, the result (B, L). Raises ValueError for shapes that differ and for rewards that are not finite.
    """
    expect_same_shape(rewards=rewards, mask=mask)
    expect_finite(rewards=rewards)
    running = torch.zeros_like(rewards[:, 0])
    returns = torch.zeros_like(rewards)
    for column in reversed(range(rewards.shape[1])):
        selected = mask[:, column]
        running = torch.where(selected, rewards[:, column] + gamma * running, running)
        returns[:, column] = torch.where(selected, running, 0.0)
    return returns


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Advantages A_t = d_t + gamma lambda A_u with d_t = r_t + gamma V_u - V_t, and the returns A_t + V_t; u is the
    next selected token of the row, and after the last one V and A are 0. Both are 0 outside the mask.

    GAE, arXiv:1506.02438, eq. 16. Not whitened. A reward outside the mask counts for the selected token before it.
    Shapes: `rewards` and `values` (B, L), `mask` (B, L) bool, both results (B, L). Raises ValueError for shapes that
    differ and for rewards that are not finite.
    """
    expect_same_shape(rewards=rewards, values=values, mask=mask)
    expect_finite(rewards=rewards)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    next_value, running, pending = (torch.zeros_like(values[:, 0]) for _ in range(3))
    for column in reversed(range(rewards.shape[1])):
        selected = mask[:, column]
        reward = rewards[:, column] + pending
        value = torch.where(selected, values[:, column], 0.0)
        advantage = reward + gamma * next_value - value + gamma * lambd * running
        running = torch.where(selected, advantage, running)
        next_value = torch.where(selected, value, next_value)
        pending = torch.where(selected, 0.0, reward)
        advantages[:, column] = torch.where(selected, advantage, 0.0)
        returns[:, column] = torch.where(selected, advantage + value, 0.0)
    return advantages, returns


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, discount: float) -> Tensor:
    """A_t = sum over s >= t of discount^(s - t) (log nu_s - log pi_s), over the selected tokens of the row from t on;
    0 elsewhere. Under the policy gradient these advantages minimize the reverse KL(pi || nu) on the student's own
    samples.

    MiniLLM, arXiv:2306.08543, section 2.2, is `discount` 1; 0 is the KL of each next token alone (on-policy
    distillation, thinkingmachines.ai/blog/on-policy-distillation). Shapes: `logprobs` (B, L) of the policy that
    sampled, `teacher_logprobs` (B, L), `mask` (B, L) bool, the result (B, L). Raises ValueError for shapes that differ
    and for log-probabilities of selected tokens that are not finite.
    """
    expect_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    gains = torch.where(mask, teacher_logprobs - logprobs, 0.0)
    return discounted_returns(gains, mask, gamma=discount)
