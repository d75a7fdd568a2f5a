"""Selects the policy loss of a configuration; no other module does."""

from __future__ import annotations

from skyrl.algorithms.clipped_losses import CISPOLoss, DualClipLoss, GMPOLoss, GSPOLoss, RegularLoss, SAPOLoss
from skyrl.algorithms.covariance_losses import ClipCovLoss, KLCovLoss
from skyrl.algorithms.losses import PolicyLoss
from skyrl.algorithms.rollout_losses import (
    CrossEntropyLoss,
    DecoupledLoss,
    DPPOLoss,
    ImportanceSamplingLoss,
    RolloutISLoss,
)
from skyrl.config import AlgorithmConfig
from skyrl.config.settings.registry import PolicyLossRegistry


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The loss that the configuration asks for, with its settings. Raises `ConfigError` for an unknown loss."""
    low, high = algorithm.eps_clip_low, algorithm.eps_clip_high
    match algorithm.policy_loss_type:
        case "regular":
            return RegularLoss(clip_low=low, clip_high=high)
        case "dual_clip":
            return DualClipLoss(clip_low=low, clip_high=high, bound=algorithm.clip_ratio_c)
        case "gspo":
            return GSPOLoss(clip_low=low, clip_high=high)
        case "rollout_is":
            return RolloutISLoss(clip_low=low, clip_high=high)
        case "importance_sampling":
            return ImportanceSamplingLoss()
        case "cross_entropy":
            return CrossEntropyLoss()
    return _with_a_table_of_its_own(algorithm)


def _with_a_table_of_its_own(algorithm: AlgorithmConfig) -> PolicyLoss:
    name, low, high = algorithm.policy_loss_type, algorithm.eps_clip_low, algorithm.eps_clip_high
    match name:
        case "gmpo":
            return GMPOLoss(log_low=algorithm.gmpo.log_clip_low, log_high=algorithm.gmpo.log_clip_high)
        case "cispo":
            cispo = algorithm.cispo
            return CISPOLoss(
                clip_low=cispo.cispo_eps_clip_low, clip_high=cispo.cispo_eps_clip_high, anchor=cispo.cispo_anchor
            )
        case "sapo":
            return SAPOLoss(tau_pos=algorithm.sapo.tau_pos, tau_neg=algorithm.sapo.tau_neg)
        case "dppo":
            dppo = algorithm.dppo
            return DPPOLoss(divergence=dppo.dppo_type, low=dppo.delta_low, high=dppo.delta_high)
        case "decoupled":
            return _decoupled(algorithm)
        case "clip_cov":
            chosen = algorithm.clip_cov
            return ClipCovLoss(
                clip_low=low,
                clip_high=high,
                share=chosen.clip_ratio,
                covariance_low=chosen.clip_cov_lb,
                covariance_high=chosen.clip_cov_ub,
            )
        case "kl_cov":
            return KLCovLoss(share=algorithm.kl_cov.kl_cov_frac, coefficient=algorithm.kl_cov.ppo_kl_coef)
    own: PolicyLoss = PolicyLossRegistry.object(name, algorithm.policy_loss)
    return own


def _decoupled(algorithm: AlgorithmConfig) -> DecoupledLoss:
    decoupled = algorithm.decoupled
    return DecoupledLoss(
        clip_low=algorithm.eps_clip_low,
        clip_high=algorithm.eps_clip_high,
        cap=decoupled.behav_imp_weight_cap,
        cap_mode=decoupled.cap_mode,
        bound=algorithm.clip_ratio_c if decoupled.dual_clip else None,
    )
