"""Advantages from a teacher: how much more probable it finds each token that the student sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.returns import discounted_returns
from skyrl.algorithms.shapes import expect_same_shape


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
