"""Policy losses: their settings, facts about each of them, and off-policy corrections.

`POLICY_LOSSES` registers the built-in losses: checks, effects, sizes and learners read it. Formulas and papers are with
the classes in `skyrl.algorithms`, whose fields have the names of the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs

from skyrl.config.foundation.entry import BaseConfig
from skyrl.errors import Problem
from skyrl.tree import field, frozen
from skyrl.tree.validators import at_least, fraction, non_negative, positive


@frozen
class SAPOConfig(BaseConfig):
    """Soft gates in place of clipping; read by `policy_loss_type = "sapo"`."""

    tau_pos: float = field(default=1.0, validator=positive)
    """Steepness of the gate for tokens with a positive advantage."""

    tau_neg: float = field(default=1.05, validator=positive)
    """Steepness of the gate for the others; a larger one damps them faster."""


@frozen
class ClipCovConfig(BaseConfig):
    """Takes some tokens whose log-probability and advantage covary out of the loss; `policy_loss_type = "clip_cov"`."""

    clip_ratio: float = field(default=0.0002, validator=fraction)
    """Part of the tokens that are taken out; at least one is."""

    clip_cov_lb: float = 1.0
    """Lower bound on the covariance of the tokens among which those taken out are drawn at random."""

    clip_cov_ub: float = 5.0
    """Upper bound on the covariance of the tokens among which those taken out are drawn at random."""


@frozen
class KLCovConfig(BaseConfig):
    """A penalty on the tokens that covary the most, to keep entropy up; read by `policy_loss_type = "kl_cov"`."""

    kl_cov_frac: float = field(default=0.2, validator=fraction)
    """Part of the tokens that are penalized; at least one is."""

    ppo_kl_coef: float = field(default=1.0, validator=non_negative)
    """Weight of the penalty |log pi - log pi_old|."""


@frozen
class CISPOConfig(BaseConfig):
    """Clips the importance weight, not the token's update; read by `policy_loss_type = "cispo"`.

    The weight is held in [1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high]: [0, 5] by default, the bounds of ScaleRL,
    arXiv:2510.13786. Until July 2026 SkyRL had defaults of 0 and 5 here, which are [1, 6] (NovaSky-AI/SkyRL#1928).
    """

    cispo_eps_clip_low: float = field(default=1.0, validator=non_negative)
    """Distance of the lower bound from 1. 0: weights below 1 become 1; 1 or more: no lower bound."""

    cispo_eps_clip_high: float = field(default=4.0, validator=non_negative)
    """Distance of the upper bound from 1."""

    cispo_anchor: Literal["old", "rollout"] = "old"
    """Policy that the weight compares the current one with: itself before this batch, or the engine that drew the
    tokens."""


@frozen
class DPPOConfig(BaseConfig):
    """Cuts the tokens that would carry the policy too far from the engine's; read by `policy_loss_type = "dppo"`."""

    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """Distance between the two probabilities of the drawn token: their difference, or the KL divergence of drawing it
    or not."""

    delta_low: float = field(default=0.2, validator=non_negative)
    """Distance beyond which a token with a negative advantage that already became less likely is cut."""

    delta_high: float = field(default=0.2, validator=non_negative)
    """Distance beyond which a token with a positive advantage that already became likelier is cut."""


@frozen
class GMPOConfig(BaseConfig):
    """The geometric mean of an answer's ratios; read by `policy_loss_type = "gmpo"` (arXiv:2507.20673)."""

    log_clip_low: float = field(default=0.4, validator=positive)
    """The logarithm of a bad token's ratio is held above minus this."""

    log_clip_high: float = field(default=0.4, validator=positive)
    """The logarithm of a good token's ratio is held below this."""


@frozen
class DecoupledConfig(BaseConfig):
    """PPO around the old policy, weighted by how it differs from the engine's; `policy_loss_type = "decoupled"`."""

    behav_imp_weight_cap: float | None = field(default=None, validator=at_least(1))
    """Largest weight pi_old / pi_rollout of a token. None: no cap."""

    cap_mode: Literal["mask", "clamp"] = "mask"
    """Policy for a token above the cap. mask: it is left out of the loss, but still counted; clamp: its weight is held
    to the cap."""

    dual_clip: bool = False
    """Bound the loss of tokens with a negative advantage by `clip_ratio_c`, as dual_clip does."""


@frozen
class OnlineDPOConfig(BaseConfig):
    """Pairs of a prompt's own answers, compared as in a preference run; read by `policy_loss_type = "online_dpo"`."""

    loss_type: Literal[
        "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sigmoid_norm"
    ] = "sigmoid"
    """Loss of a pair, under the names and with the formulas of `kind = "preference"` (docs/preferences.md)."""

    beta: float = field(default=0.1, validator=positive)
    """Strength of the tie to the reference: a larger `beta` moves the policy less."""

    pairs: Literal["best_worst", "all", "random"] = "best_worst"
    """Pairs of each group. best_worst: the answers with the highest and the lowest reward; all: every two answers whose
    rewards differ; random: one of these, drawn from the seed."""


@frozen
class OffPolicyCorrectionConfig(BaseConfig):
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
    """Upper bound under `geometric`: sequences above it are left out. Mixture-of-experts models may need a wider range.
    """

    geo_mask_low: float = field(default=0.99, validator=non_negative)
    """Lower bound under `geometric`: sequences below it are left out."""

    product_mask_high: float = field(default=2.0, validator=positive)
    """Upper bound under `product`: sequences above it are left out."""

    product_mask_low: float = field(default=0.5, validator=non_negative)
    """Lower bound under `product`: sequences below it are left out."""

    outlier_token_is_threshold_low: float | None = field(default=None, validator=non_negative)
    """Leave out a sequence if any token's ratio is below this, such as 1e-4. None: off."""

    outlier_token_is_threshold_high: float | None = field(default=None, validator=positive)
    """Leave out a sequence if any token's ratio is above this, such as 100. None: off."""

    token_mask_is_threshold_low: float | None = field(default=None, validator=non_negative)
    """Leave out a token whose ratio is below this. None: no lower bound."""

    token_mask_is_threshold_high: float | None = field(default=None, validator=positive)
    """Leave out a token whose ratio is above this. None: no upper bound."""

    def own_problems(self) -> Iterator[Problem]:
        """Each lower bound lies below its upper bound."""
        for low_name, high_name in (
            ("geo_mask_low", "geo_mask_high"),
            ("product_mask_low", "product_mask_high"),
            ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
            ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
        ):
            low, high = getattr(self, low_name), getattr(self, high_name)
            if low is not None and high is not None and low >= high:
                message = f"{low} is not below {high_name} = {high}, so that nothing would be left"
                yield Problem(path=low_name, message=message, hint="1 means no difference")


@attrs.frozen(kw_only=True)
class LossFacts:
    """Facts about a policy loss.

    A user's loss declares what differs from `USER_LOSS` as attributes of its class, True or False, under the names of
    these fields.
    """

    loss_class: str = ""
    """Class of the loss, as "module:Class" of `skyrl.algorithms`. Its fields have the names of the settings that it
    reads. Empty for a loss of the user's."""

    table: str = ""
    """Table of `trainer.algorithm` with its settings; empty for none."""

    fields: tuple[str, ...] = ()
    """Other fields of `trainer.algorithm` that it reads."""

    ratio_fields: tuple[str, ...] = ()
    """Fields of `table` that have no effect where the ratio pi / pi_old is 1, such as bounds of it."""

    reads_advantages: bool = True
    """Whether the loss reads advantages."""

    reads_old_logprobs: bool = True
    """Whether the loss compares with the policy before the batch's first update. If no update needs that, no pass
    computes it."""

    reads_rollout_logprobs: bool | None = False
    """Whether the loss compares with the engine that drew the tokens, and so corrects stale samples itself. None:
    unknown."""

    expects_sequence_mean: bool = False
    """Whether its paper gives every answer the same share: `loss_reduction = "sequence_mean"`."""

    takes_corrections: bool = True
    """Whether corrections of single sequences suit the loss. False if it selects tokens across all sequences."""

    learns_from_pairs: bool = False
    """Whether the loss is one of pairs of answers: rewards rank them, log-probabilities of a reference are compared
    with, and `reads_advantages` is false."""

    zero_at_zero_advantage: bool = False
    """Whether loss and gradient are exactly 0 at tokens with advantage 0: rows with only such tokens skip the forward
    pass."""

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards decide what is learned, by advantages or by the order of answers."""
        return self.reads_advantages or self.learns_from_pairs

    overrides_for: Callable[[Any], Mapping[str, Any]] = lambda settings: {}
    """Facts that differ under given settings of the loss's table, by name."""


_CLIP = ("eps_clip_low", "eps_clip_high")


def _cispo_facts(cispo: CISPOConfig) -> Mapping[str, Any]:
    by_engine = cispo.cispo_anchor == "rollout"
    return {"reads_old_logprobs": not by_engine, "reads_rollout_logprobs": by_engine}


def _decoupled_facts(decoupled: DecoupledConfig) -> Mapping[str, Any]:
    return {"fields": (*_CLIP, "clip_ratio_c")} if decoupled.dual_clip else {}


POLICY_LOSSES: Mapping[str, LossFacts] = {
    "regular": LossFacts(loss_class="clipped_losses:RegularLoss", fields=_CLIP, zero_at_zero_advantage=True),
    "dual_clip": LossFacts(
        loss_class="clipped_losses:DualClipLoss", fields=(*_CLIP, "clip_ratio_c"), zero_at_zero_advantage=True
    ),
    "gspo": LossFacts(
        loss_class="clipped_losses:GSPOLoss", fields=_CLIP, expects_sequence_mean=True, zero_at_zero_advantage=True
    ),
    "gmpo": LossFacts(
        loss_class="clipped_losses:GMPOLoss",
        table="gmpo",
        ratio_fields=("log_clip_low", "log_clip_high"),
        expects_sequence_mean=True,
        zero_at_zero_advantage=True,
    ),
    "cispo": LossFacts(
        loss_class="clipped_losses:CISPOLoss",
        table="cispo",
        ratio_fields=("cispo_eps_clip_low", "cispo_eps_clip_high"),
        zero_at_zero_advantage=True,
        overrides_for=_cispo_facts,
    ),
    "sapo": LossFacts(
        loss_class="clipped_losses:SAPOLoss", table="sapo", expects_sequence_mean=True, zero_at_zero_advantage=True
    ),
    "clip_cov": LossFacts(
        loss_class="covariance_losses:ClipCovLoss", table="clip_cov", fields=_CLIP, takes_corrections=False
    ),
    "kl_cov": LossFacts(
        loss_class="covariance_losses:KLCovLoss",
        table="kl_cov",
        ratio_fields=("kl_cov_frac", "ppo_kl_coef"),
        takes_corrections=False,
    ),
    "rollout_is": LossFacts(
        loss_class="rollout_losses:RolloutISLoss",
        fields=_CLIP,
        reads_old_logprobs=False,
        reads_rollout_logprobs=True,
        zero_at_zero_advantage=True,
    ),
    "dppo": LossFacts(
        loss_class="rollout_losses:DPPOLoss",
        table="dppo",
        reads_old_logprobs=False,
        reads_rollout_logprobs=True,
        zero_at_zero_advantage=True,
    ),
    "decoupled": LossFacts(
        loss_class="rollout_losses:DecoupledLoss",
        table="decoupled",
        fields=_CLIP,
        reads_rollout_logprobs=True,
        zero_at_zero_advantage=True,
        overrides_for=_decoupled_facts,
    ),
    "importance_sampling": LossFacts(loss_class="rollout_losses:ImportanceSamplingLoss", zero_at_zero_advantage=True),
    "cross_entropy": LossFacts(
        loss_class="rollout_losses:CrossEntropyLoss", reads_advantages=False, reads_old_logprobs=False
    ),
    "online_dpo": LossFacts(
        loss_class="ranked_pairs:OnlineDPOLoss",
        table="online_dpo",
        reads_advantages=False,
        reads_old_logprobs=False,
        takes_corrections=False,
        learns_from_pairs=True,
        zero_at_zero_advantage=True,
    ),
}
"""Facts about each built-in loss, keyed by the value of `policy_loss_type`."""

USER_LOSS = LossFacts(reads_rollout_logprobs=None)
"""Facts assumed of a user's loss that declares none."""


def asks_for_correction(correction: OffPolicyCorrectionConfig) -> bool:
    """Whether any correction is on."""
    switches = (
        correction.tis_ratio_type,
        correction.sequence_mask_metric,
        correction.outlier_token_is_threshold_low,
        correction.outlier_token_is_threshold_high,
        correction.token_mask_is_threshold_low,
        correction.token_mask_is_threshold_high,
    )
    return any(switch is not None for switch in switches)
