"""Settings of single policy losses and of the corrections around them. Formulas and papers are with the functions."""

from typing import Literal

from skyrl.tree import field, frozen
from skyrl.tree.validators import at_least, fraction, non_negative, positive


@frozen
class SAPOConfig:
    """Soft gates in place of clipping; read by `policy_loss_type = "sapo"`."""

    tau_pos: float = field(default=1.0, validator=positive)
    """Steepness of the gate for tokens with a positive advantage."""

    tau_neg: float = field(default=1.05, validator=positive)
    """Steepness of the gate for the others; a larger one damps them faster."""


@frozen
class ClipCovConfig:
    """Takes some tokens whose log-probability and advantage covary out of the loss; `policy_loss_type = "clip_cov"`."""

    clip_ratio: float = field(default=0.0002, validator=fraction)
    """Part of the tokens that are taken out; at least one is."""

    clip_cov_lb: float = 1.0
    """They are drawn at random from tokens whose covariance is above this ..."""

    clip_cov_ub: float = 5.0
    """... and below this."""


@frozen
class KLCovConfig:
    """A penalty on the tokens that covary the most, to keep entropy up; read by `policy_loss_type = "kl_cov"`."""

    kl_cov_frac: float = field(default=0.2, validator=fraction)
    """Part of the tokens that are penalized; at least one is."""

    ppo_kl_coef: float = field(default=1.0, validator=non_negative)
    """Weight of the penalty |log pi - log pi_old|."""


@frozen
class CISPOConfig:
    """Clips the importance weight, not the token's update; read by `policy_loss_type = "cispo"`.

    The weight is held in [1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high]: [0, 5] by default, the bounds of ScaleRL,
    arXiv:2510.13786. Until July 2026 SkyRL had defaults of 0 and 5 here, which are [1, 6] (NovaSky-AI/SkyRL#1928).
    """

    cispo_eps_clip_low: float = field(default=1.0, validator=non_negative)
    """Distance of the lower bound from 1. 0: weights below 1 become 1; 1 or more: no lower bound."""

    cispo_eps_clip_high: float = field(default=4.0, validator=non_negative)
    """Distance of the upper bound from 1."""

    cispo_anchor: Literal["old", "rollout"] = "old"
    """What the weight compares the policy with: itself before this batch, or the engine that drew the tokens."""


@frozen
class DPPOConfig:
    """Cuts the tokens that would carry the policy too far from the engine's; read by `policy_loss_type = "dppo"`."""

    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """Distance between the two probabilities of the drawn token: their difference, or the KL divergence of drawing it
    or not."""

    delta_low: float = field(default=0.2, validator=non_negative)
    """Distance beyond which a token with a negative advantage that already became less likely is cut."""

    delta_high: float = field(default=0.2, validator=non_negative)
    """Distance beyond which a token with a positive advantage that already became likelier is cut."""


@frozen
class GMPOConfig:
    """The geometric mean of an answer's ratios; read by `policy_loss_type = "gmpo"` (arXiv:2507.20673)."""

    log_clip_low: float = field(default=0.4, validator=positive)
    """The logarithm of a bad token's ratio is held above minus this."""

    log_clip_high: float = field(default=0.4, validator=positive)
    """The logarithm of a good token's ratio is held below this."""


@frozen
class DecoupledConfig:
    """PPO around the old policy, weighted by how it differs from the engine's; `policy_loss_type = "decoupled"`."""

    behav_imp_weight_cap: float | None = field(default=None, validator=at_least(1))
    """Largest weight pi_old / pi_rollout of a token. None: no cap."""

    cap_mode: Literal["mask", "clamp"] = "mask"
    """What becomes of a token above the cap: it is left out, though still counted, or its weight is held to the cap."""

    dual_clip: bool = False
    """Hold the loss of tokens with a negative advantage, as dual_clip does, by `clip_ratio_c`."""


@frozen
class OffPolicyCorrectionConfig:
    """Corrections for the gap between the engine that drew the tokens and the learner that scores them.

    They use the ratio rho = exp(log pi_old - log pi_rollout) of each token, so they need the engine's log-probabilities
    (`sampling_params.logprobs`). Order: outlier masks, token mask, truncated importance sampling, sequence mask.
    """

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: multiply each token's loss by its own ratio, or by its sequence's (the product),
    cut off above. None: off."""

    token_tis_ratio_clip_high: float = field(default=2.0, validator=positive)
    """Cut of the ratio under `token`; 1.5 to 5 is usual."""

    sequence_tis_ratio_clip_high: float = field(default=5.0, validator=positive)
    """Cut of the ratio under `sequence`; 2 to 10 is usual."""

    sequence_mask_metric: Literal["geometric", "product"] | None = None
    """Leave out whole sequences by the geometric mean, or by the product, of their ratios. None: off."""

    geo_mask_high: float = field(default=1.01, validator=positive)
    """Under `geometric`: sequences above this are left out. Mixture-of-experts models may need a wider range."""

    geo_mask_low: float = field(default=0.99, validator=non_negative)
    """Under `geometric`: sequences below this are left out."""

    product_mask_high: float = field(default=2.0, validator=positive)
    """Under `product`: sequences above this are left out."""

    product_mask_low: float = field(default=0.5, validator=non_negative)
    """Under `product`: sequences below this are left out."""

    outlier_token_is_threshold_low: float | None = field(default=None, validator=non_negative)
    """Leave out a sequence if any token's ratio is below this, such as 1e-4. None: off."""

    outlier_token_is_threshold_high: float | None = field(default=None, validator=positive)
    """Leave out a sequence if any token's ratio is above this, such as 100. None: off."""

    token_mask_is_threshold_low: float | None = field(default=None, validator=non_negative)
    """Leave out a token whose ratio is below this. None: no lower bound."""

    token_mask_is_threshold_high: float | None = field(default=None, validator=positive)
    """Leave out a token whose ratio is above this. None: no upper bound."""


def asks_for_correction(correction: OffPolicyCorrectionConfig) -> bool:
    """Is any of them on?"""
    bounds = (
        correction.outlier_token_is_threshold_low,
        correction.outlier_token_is_threshold_high,
        correction.token_mask_is_threshold_low,
        correction.token_mask_is_threshold_high,
    )
    asked = correction.tis_ratio_type or correction.sequence_mask_metric
    return asked is not None or any(bound is not None for bound in bounds)
