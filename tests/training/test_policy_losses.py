"""From settings to the parameters of a loss: each setting has a number of its own, and arrives where it belongs."""

from __future__ import annotations

import pytest

from skyrl.algorithms.clipped_losses import CISPOLoss, DualClipLoss, GMPOLoss, GSPOLoss, RegularLoss, SAPOLoss
from skyrl.algorithms.covariance_losses import ClipCovLoss, KLCovLoss
from skyrl.algorithms.losses import PolicyLoss
from skyrl.algorithms.ranked_pairs import OnlineDPOLoss
from skyrl.algorithms.rollout_losses import (
    CrossEntropyLoss,
    DecoupledLoss,
    DPPOLoss,
    ImportanceSamplingLoss,
    RolloutISLoss,
)
from skyrl.config import load
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.training.objective import policy_loss

SETTINGS = {
    "eps_clip_low": 0.11,
    "eps_clip_high": 0.12,
    "clip_ratio_c": 3.5,
    "gmpo.log_clip_low": 0.21,
    "gmpo.log_clip_high": 0.22,
    "cispo.cispo_eps_clip_low": 0.31,
    "cispo.cispo_eps_clip_high": 5.1,
    "cispo.cispo_anchor": "rollout",
    "sapo.tau_pos": 1.1,
    "sapo.tau_neg": 1.2,
    "dppo.dppo_type": "binary_kl",
    "dppo.delta_low": 0.41,
    "dppo.delta_high": 0.42,
    "decoupled.behav_imp_weight_cap": 6.5,
    "decoupled.cap_mode": "clamp",
    "decoupled.dual_clip": True,
    "clip_cov.clip_ratio": 0.51,
    "clip_cov.clip_cov_lb": 0.6,
    "clip_cov.clip_cov_ub": 0.7,
    "kl_cov.kl_cov_frac": 0.81,
    "kl_cov.ppo_kl_coef": 0.91,
    "online_dpo.loss_type": "ipo",
    "online_dpo.beta": 0.15,
    "online_dpo.pairs": "all",
}
"""Fields of `trainer.algorithm`."""

LOSSES: dict[str, PolicyLoss] = {
    "online_dpo": OnlineDPOLoss(loss_type="ipo", beta=0.15, pairs="all"),
    "regular": RegularLoss(eps_clip_low=0.11, eps_clip_high=0.12),
    "dual_clip": DualClipLoss(eps_clip_low=0.11, eps_clip_high=0.12, clip_ratio_c=3.5),
    "gspo": GSPOLoss(eps_clip_low=0.11, eps_clip_high=0.12),
    "rollout_is": RolloutISLoss(eps_clip_low=0.11, eps_clip_high=0.12),
    "importance_sampling": ImportanceSamplingLoss(),
    "cross_entropy": CrossEntropyLoss(),
    "gmpo": GMPOLoss(log_clip_low=0.21, log_clip_high=0.22),
    "cispo": CISPOLoss(cispo_eps_clip_low=0.31, cispo_eps_clip_high=5.1, cispo_anchor="rollout"),
    "sapo": SAPOLoss(tau_pos=1.1, tau_neg=1.2),
    "dppo": DPPOLoss(dppo_type="binary_kl", delta_low=0.41, delta_high=0.42),
    "decoupled": DecoupledLoss(
        eps_clip_low=0.11,
        eps_clip_high=0.12,
        behav_imp_weight_cap=6.5,
        cap_mode="clamp",
        dual_clip=True,
        clip_ratio_c=3.5,
    ),
    "clip_cov": ClipCovLoss(eps_clip_low=0.11, eps_clip_high=0.12, clip_ratio=0.51, clip_cov_lb=0.6, clip_cov_ub=0.7),
    "kl_cov": KLCovLoss(kl_cov_frac=0.81, ppo_kl_coef=0.91),
}
"""What each loss is made with."""


def made(name: str, **changes: object) -> PolicyLoss:
    settings = {**SETTINGS, **changes, "policy_loss_type": name}
    run = load([], {f"trainer.algorithm.{path}": value for path, value in settings.items()}).config
    return policy_loss(run.trainer.algorithm)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_has_the_settings_that_the_run_has(name: str) -> None:
    assert made(name) == LOSSES[name]


def test_the_decoupled_loss_is_clipped_twice_only_where_it_is_asked_to_be() -> None:
    assert made("decoupled", **{"decoupled.dual_clip": False}) == DecoupledLoss(
        eps_clip_low=0.11,
        eps_clip_high=0.12,
        behav_imp_weight_cap=6.5,
        cap_mode="clamp",
    )
