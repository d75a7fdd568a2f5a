"""Policy losses: per token, no reduction. `loss(LossInputs) -> (B, L)`; how tokens are weighed is `reductions.py`."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class LossInputs:
    """What a policy loss may look at; every tensor is (B, L), log-probabilities in nats."""

    logprobs: Tensor
    """Under the policy that is being updated: the one tensor with a gradient."""

    old_logprobs: Tensor
    """Under the policy before this batch's first update."""

    rollout_logprobs: Tensor
    """As the engine sampled."""

    advantages: Tensor
    mask: Tensor
    """Bool: tokens outside it do not count, whatever stands there."""


class PolicyLoss(Protocol):
    """A policy loss with its settings: what it costs, and what is worth logging about it."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """The loss of each token, (B, L), unreduced."""

    def measure(self, inputs: LossInputs) -> dict[str, float]:
        """Shares and means over the selected tokens, by name."""


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / pi_old, per token.

    PPO, arXiv:1707.06347, eq. 7; `clip_high > clip_low` is the clip-higher of DAPO, arXiv:2503.14476.
    Shapes: all inputs and the result (B, L); log-probabilities in nats.
    """
    ratio = importance_ratio(logprobs, old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def importance_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(logprobs - other), with the difference held to +-20 nats so that one token cannot overflow the batch."""
    return torch.exp((logprobs - other).clamp(-20.0, 20.0))


def clipped_share(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Tensor:
    """Share of tokens whose clipped term is the smaller one, where the surrogate has no gradient. A scalar in 0..1."""
    ratio = importance_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * inputs.advantages < ratio * inputs.advantages
    return (clipped & inputs.mask).sum() / inputs.mask.sum().clamp(min=1)
