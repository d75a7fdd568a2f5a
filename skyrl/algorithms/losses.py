"""Policy losses: per token, no reduction. `loss(LossInputs) -> (B, L)`; `reductions.py` weighs the tokens.

A loss with settings is a frozen class with `__call__`, whose fields are its settings. The built-in ones are in
`clipped_losses.py`, `rollout_losses.py` and `covariance_losses.py`. A custom loss has the same form; its class is made
with `skyrl.tree.frozen`, so that its fields are read and checked as configuration:

    @frozen
    class Mine:
        width: float = 0.2

        def __call__(self, inputs: LossInputs) -> Tensor:
            ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
            return -ratio.clamp(max=1 + self.width) * inputs.advantages

It may also have a method `measure(inputs) -> dict[str, Tensor]`: numbers (B, L) for each token, of which the mean over
the selected tokens is logged. Attributes of the class declare facts that the configuration needs. For example,

    zero_at_zero_advantage: ClassVar[bool] = True

says that loss and gradient are exactly 0 at tokens whose advantage is 0, so that rows without any other token skip the
forward pass; `reads_old_logprobs = False` saves a forward pass over each batch. `LossFacts` of
`skyrl.config.settings.losses` lists all of these facts, and `POLICY_LOSSES` in the same module has those of the
built-in losses.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.shapes import expect_same_shape

LARGEST_LOG_RATIO = 20.0
"""Bound on log ratios, in nats; one token must not overflow the batch."""


@attrs.frozen(kw_only=True, eq=False)
class LossInputs:
    """Inputs of a policy loss; every tensor is (B, L), log-probabilities in nats."""

    logprobs: Tensor
    """Log-probabilities under the policy that is being updated: the one tensor with a gradient."""

    old_logprobs: Tensor
    """Log-probabilities under the policy before this batch's first update."""

    rollout_logprobs: Tensor
    """Log-probabilities as the engine sampled the tokens."""

    advantages: Tensor
    mask: Tensor
    """Bool; tokens outside it do not count, whatever their values."""

    weights: Tensor | None = None
    """Weight of each token in the loss of the mini-batch, for a loss that reduces itself."""

    def __attrs_post_init__(self) -> None:
        """Raises ValueError, naming the tensor, if its shape differs from that of `logprobs`."""
        fields = attrs.asdict(self)
        expect_same_shape(**{name: tensor for name, tensor in fields.items() if tensor is not None})

    @classmethod
    def selected(cls, mask: Tensor, **tensors: Tensor) -> Self:
        """Inputs with 0 in place of everything outside the mask, NaN included, so that none of it reaches a loss or,
        by a gradient, the selected tokens. Shapes: `mask` (B, L) bool and every tensor (B, L).
        """
        return cls(mask=mask, **{name: torch.where(mask, value, 0.0) for name, value in tensors.items()})


class PolicyLoss(Protocol):
    """A policy loss with its settings."""

    def __call__(self, inputs: LossInputs, /) -> Tensor:
        """The loss of each token, (B, L), unreduced."""


def measured(loss: PolicyLoss, inputs: LossInputs) -> dict[str, Tensor]:
    """Numbers for each token that the loss wants logged, (B, L) by name; empty if it has no `measure`."""
    measure: Any = getattr(loss, "measure", None)
    return {} if measure is None else measure(inputs)


def importance_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(logprobs - other), with the difference clamped to +-20 nats so that one token cannot overflow the batch.

    Shapes: both inputs and the result the same, such as (B, L); log-probabilities in nats.
    """
    return torch.exp((logprobs - other).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / pi_old, per token.

    PPO, arXiv:1707.06347, eq. 7; `clip_high > clip_low` is the clip-higher of DAPO, arXiv:2503.14476.
    Shapes: all inputs and the result (B, L); log-probabilities in nats.
    """
    return clipped_surrogate(
        importance_ratio(logprobs, old_logprobs), advantages, clip_low=clip_low, clip_high=clip_high
    )


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) of any ratio r. Shapes: all (B, L)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Bool: whether the clipped term is the smaller one, so that the surrogate has no gradient. Shapes: all (B, L)."""
    return ratio.clamp(1 - clip_low, 1 + clip_high) * advantages < ratio * advantages
