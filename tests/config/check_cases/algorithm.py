"""Cases of the checks in `skyrl.config.checks.algorithm`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import CRITIC

ALGORITHM = "trainer.algorithm."
CORRECTION = ALGORITHM + "off_policy_correction."

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gae_has_a_critic": [({"trainer.algorithm.advantage_estimator": "gae"}, "trainer.critic.model.path")],
    "kl_is_counted_once": [({"trainer.algorithm.use_kl_in_reward": True}, "trainer.algorithm.use_kl_in_reward")],
    "the_advantage_estimator_exists": [
        ({"trainer.algorithm.advantage_estimator": name}, "trainer.algorithm.advantage_estimator")
        for name in ("grop", "my_own", "no_such_module:Mine", "no_such_file.py:Mine", "math:pi")
    ],
    "the_policy_loss_exists": [
        ({"trainer.algorithm.policy_loss_type": name}, "trainer.algorithm.policy_loss_type")
        for name in ("regula", "my_own", "no_such_module:Mine", "no_such_file.py:Mine", "math:pi")
    ],
    "a_critic_is_asked": [(CRITIC, "trainer.critic.model.path")],
    "advantages_are_normalized_once": [
        (
            {ALGORITHM + "advantage_batch_normalize": True, ALGORITHM + "advantage_norm.mean_level": "group"},
            ALGORITHM + "advantage_batch_normalize",
        )
    ],
    "the_engines_logprobs_are_compared_with_others": [
        ({ALGORITHM + "old_logprobs": "engine", **compared}, ALGORITHM + "old_logprobs")
        for compared in ({ALGORITHM + "policy_loss_type": "decoupled"}, {CORRECTION + "tis_ratio_type": "token"})
    ],
    "corrections_suit_the_loss": [
        (
            {ALGORITHM + "policy_loss_type": loss, CORRECTION + "tis_ratio_type": "token"},
            CORRECTION + "tis_ratio_type",
        )
        for loss in ("clip_cov", "kl_cov", "rollout_is", "dppo", "decoupled")
    ]
    + [
        (
            {ALGORITHM + "policy_loss_type": "kl_cov", CORRECTION + "sequence_mask_metric": "product"},
            CORRECTION + "sequence_mask_metric",
        ),
        (
            {
                ALGORITHM + "policy_loss_type": "cispo",
                ALGORITHM + "cispo.cispo_anchor": "rollout",
                CORRECTION + "tis_ratio_type": "sequence",
            },
            CORRECTION + "tis_ratio_type",
        ),
    ],
    "correction_bounds_leave_something": [
        ({CORRECTION + "geo_mask_low": 1.02}, CORRECTION + "geo_mask_low"),
        ({CORRECTION + "product_mask_high": 0.4}, CORRECTION + "product_mask_low"),
        (
            {CORRECTION + "token_mask_is_threshold_low": 2.0, CORRECTION + "token_mask_is_threshold_high": 0.5},
            CORRECTION + "token_mask_is_threshold_low",
        ),
    ],
    "whole_answers_have_equal_shares": [
        ({ALGORITHM + "policy_loss_type": loss}, ALGORITHM + "loss_reduction") for loss in ("gspo", "sapo", "gmpo")
    ],
    "remax_compares_raw_rewards": [
        ({ALGORITHM + "advantage_estimator": "remax", ALGORITHM + f"reward_shaping.{name}": value}, path)
        for name, value, path in (
            ("scale", 2.0, ALGORITHM + "reward_shaping.scale"),
            ("norm.mean_level", "batch", ALGORITHM + "reward_shaping.norm"),
            ("overlong.buffer_len", 3, ALGORITHM + "reward_shaping.overlong.buffer_len"),
        )
    ],
    "the_overlong_buffer_fits": [
        (
            {ALGORITHM + "reward_shaping.overlong.buffer_len": 1024},
            ALGORITHM + "reward_shaping.overlong.buffer_len",
        )
    ],
    "the_engine_returns_what_the_loss_reads": [
        ({**reader, "generator.sampling_params.logprobs": None}, "generator.sampling_params.logprobs")
        for reader in ({ALGORITHM + "old_logprobs": "engine"}, {ALGORITHM + "policy_loss_type": "decoupled"})
    ],
    "a_group_has_something_to_compare": [({"generator.n_samples_per_prompt": 1}, "generator.n_samples_per_prompt")],
}

SILENT: dict[str, dict[str, Any]] = {
    "gae_has_a_critic": {"trainer.algorithm.advantage_estimator": "gae", "trainer.critic.model.path": "critic"},
    "kl_is_counted_once": {"trainer.algorithm.use_kl_in_reward": True, "trainer.algorithm.use_kl_loss": False},
    "a_critic_is_asked": {**CRITIC, ALGORITHM + "advantage_estimator": "gae"},
    "advantages_are_normalized_once": {ALGORITHM + "advantage_norm.mean_level": "group"},
    "the_engines_logprobs_are_compared_with_others": {ALGORITHM + "old_logprobs": "engine"},
    "corrections_suit_the_loss": {
        ALGORITHM + "policy_loss_type": "cispo",
        CORRECTION + "tis_ratio_type": "token",
    },
    "correction_bounds_leave_something": {CORRECTION + "token_mask_is_threshold_low": 2.0},
    "whole_answers_have_equal_shares": {
        ALGORITHM + "policy_loss_type": "gspo",
        ALGORITHM + "loss_reduction": "sequence_mean",
    },
    "remax_compares_raw_rewards": {ALGORITHM + "advantage_estimator": "remax"},
    "the_engine_returns_what_the_loss_reads": {"generator.sampling_params.logprobs": None},
    "the_overlong_buffer_fits": {ALGORITHM + "reward_shaping.overlong.buffer_len": 256},
}
