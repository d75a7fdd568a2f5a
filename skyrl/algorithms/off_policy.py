"""Corrections for the gap between the engine that drew the tokens and the learner that scores them.

All use rho = pi_old / pi_rollout, token by token, without gradient. They run in this order, each on the tokens that the
previous ones kept: outlier sequences, tokens out of bounds, truncated importance sampling, sequences out of bounds.
Tokens that are left out still count in the denominator of the loss. Shapes: log-probabilities (B, L) in nats, masks
(B, L) bool, weights (B, L) or (B, 1).

`interpolated_logprobs` takes the place of a forward pass for old log-probabilities, between a token's sampling policy
and the current one.
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.losses import LARGEST_LOG_RATIO, importance_ratio
from skyrl.algorithms.masked import masked_mean
from skyrl.algorithms.shapes import expect_same_shape


@attrs.frozen(kw_only=True)
class Bounds:
    """The interval from `low` to `high`, both included; None: no bound on that side."""

    low: float | None = None
    high: float | None = None

    def over(self, values: Tensor) -> Tensor:
        """Bool, of the shape of `values`: above the upper bound."""
        return torch.zeros_like(values, dtype=torch.bool) if self.high is None else values > self.high

    def under(self, values: Tensor) -> Tensor:
        """Bool, of the shape of `values`: below the lower bound."""
        return torch.zeros_like(values, dtype=torch.bool) if self.low is None else values < self.low

    def __bool__(self) -> bool:
        return self.low is not None or self.high is not None


@attrs.frozen(kw_only=True)
class OffPolicyCorrection:
    """The choice of corrections for samples of another policy.

    Sources: truncated importance sampling, fengyao.notion.site/off-policy-rl; masks of tokens, IcePop,
    arXiv:2510.18855, section 2.3; masks of sequences by the product or the geometric mean of ratios, Liu et al.,
    richardli.xyz/rl-collapse.
    """

    outlier_token: Bounds = Bounds()
    """A sequence is left out as a whole if the ratio of any of its tokens is outside these bounds."""

    token_mask: Bounds = Bounds()
    """Tokens whose ratio is outside these bounds are left out."""

    tis: Literal["token", "sequence"] | None = None
    """Multiplies the loss of a token by its ratio, or by the product of its sequence's ratios, capped at `tis_cap`."""

    tis_cap: float = 2.0
    sequence_metric: Literal["geometric", "product"] | None = None
    """Sequences whose geometric mean or product of ratios is outside `sequence_mask` are left out."""

    sequence_mask: Bounds = Bounds()

    def __bool__(self) -> bool:
        return bool(self.outlier_token or self.token_mask or self.tis or self.sequence_metric)


@attrs.frozen(kw_only=True, eq=False)
class Corrected:
    """Result of a correction: the remaining weights and masks, and its metrics."""

    mask: Tensor
    """(B, L) bool: tokens that still count."""

    weights: Tensor
    """(B, L): factors of the tokens' losses, 1 without truncated importance sampling."""

    numbers: dict[str, Tensor]
    """Metrics by name, one number for each real token or each sequence that has one; their means are logged."""


def correct(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: OffPolicyCorrection) -> Corrected:
    """Applies the corrections, one after the other. Raises ValueError if shapes differ."""
    expect_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    ratio = importance_ratio(log_ratio, torch.zeros_like(log_ratio))
    numbers = {"is_ratio": ratio[mask]}
    left = mask
    if correction.outlier_token:
        outlier = correction.outlier_token
        over, under = ((side(ratio) & left).any(1) for side in (outlier.over, outlier.under))
        numbers |= _shares("outlier_seq", over, under, left.any(1))
        left = left & ~(over | under).unsqueeze(1)
    if correction.token_mask:
        outside = correction.token_mask.over(ratio) | correction.token_mask.under(ratio)
        numbers["token_mask_ratio"] = outside[left]
        left = left & ~outside
    weights = torch.ones_like(ratio)
    if correction.tis == "token":
        numbers["tis_token_clip_high_ratio"] = (ratio > correction.tis_cap)[left]
        weights = ratio.clamp(max=correction.tis_cap)
    elif correction.tis == "sequence":
        ratios = sequence_ratios(log_ratio, left, "product")
        numbers["tis_seq_clip_high_ratio"] = (ratios > correction.tis_cap).squeeze(1)[left.any(1)]
        weights = ratios.clamp(max=correction.tis_cap).expand_as(left)
    if correction.sequence_metric:
        ratios = sequence_ratios(log_ratio, left, correction.sequence_metric).squeeze(1)
        over, under = correction.sequence_mask.over(ratios), correction.sequence_mask.under(ratios)
        name = {"geometric": "geo", "product": "product"}[correction.sequence_metric]
        numbers |= _shares(f"{name}_sequence_mask", over, under, left.any(1))
        left = left & ~(over | under).unsqueeze(1)
    return Corrected(mask=left, weights=weights, numbers=numbers)


def sequence_ratios(log_ratio: Tensor, mask: Tensor, metric: Literal["geometric", "product"]) -> Tensor:
    """(B, 1): exp of the mean, or of the sum, of the selected log-ratios of each sequence; 1 if it has none."""
    chosen = torch.where(mask, log_ratio, 0.0)
    total = masked_mean(chosen, mask, dim=1) if metric == "geometric" else chosen.sum(1)
    return torch.exp(total.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).unsqueeze(1)


def _shares(name: str, over: Tensor, under: Tensor, real: Tensor) -> dict[str, Tensor]:
    """One number for each sequence that has a token."""
    result = {"masked": over | under, "over_high": over, "under_low": under}
    return {f"{name}_{kind}_ratio": flags[real] for kind, flags in result.items()}


def interpolation_weight(versions_behind: Tensor) -> Tensor:
    """Share a of the current policy in the interpolation: 1 - 1/s after s weight updates since the token was drawn, 0
    after none. Shapes: (B, L) updates -> (B, L) float32 in [0, 1).

    AReaL's `prox_logp_method = loglinear`: a = (v - 1 - b) / (v - b), where v is the version of the weights that learn
    from the batch and b the version that drew the token, so that the old policy is one version behind v.
    """
    behind = versions_behind.float()
    return torch.where(behind > 0, 1 - 1 / behind.clamp(min=1), 0.0)


def interpolated_logprobs(drawn: Tensor, current: Tensor, weight: Tensor) -> Tensor:
    """log pi_drawn + a (log pi - log pi_drawn): linear in log-probabilities, a geometric mean of probabilities.

    Shapes: all inputs and the result (B, L); log-probabilities in nats, `weight` as `interpolation_weight` gives it.
    """
    return drawn + weight * (current - drawn)
