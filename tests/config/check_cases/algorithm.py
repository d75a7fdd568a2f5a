"""Cases of the checks in `skyrl.config.checks.algorithm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.config.check_cases.settings import CRITIC

ALGORITHM = "trainer.algorithm."
CORRECTION = ALGORITHM + "off_policy_correction."
PAIRS = {ALGORITHM + "policy_loss_type": "online_dpo"}
MOVES = ALGORITHM + "distillation.teacher_update_rate"
OWN_AVERAGE = {MOVES: 0.05, "trainer.teacher.model.path": "model", "trainer.policy.model.path": "model"}
ITSELF, HINT = ALGORITHM + "distillation.self_teacher", ALGORITHM + "distillation.hint.source"
OTHERS = Path(__file__).parents[2] / "training" / "peer_functions_of_users.py"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gae_needs_critic": [({"trainer.algorithm.advantage_estimator": "gae"}, "trainer.critic.model.path")],
    "kl_is_counted_once": [({"trainer.algorithm.use_kl_in_reward": True}, "trainer.algorithm.use_kl_in_reward")],
    "advantage_estimator_exists": [
        ({"trainer.algorithm.advantage_estimator": name}, "trainer.algorithm.advantage_estimator")
        for name in ("grop", "my_own", "no_such_module:Mine", "no_such_file.py:Mine", "math:pi")
    ],
    "policy_loss_exists": [
        ({"trainer.algorithm.policy_loss_type": name}, "trainer.algorithm.policy_loss_type")
        for name in ("regula", "my_own", "no_such_module:Mine", "no_such_file.py:Mine", "math:pi")
    ],
    "critic_values_are_read": [(CRITIC, "trainer.critic.model.path")],
    "pairs_replace_advantages": [
        ({**PAIRS, **others}, path)
        for others, path in (
            ({ALGORITHM + "advantage_estimator": "remax"}, ALGORITHM + "advantage_estimator"),
            ({ALGORITHM + "use_kl_in_reward": True, ALGORITHM + "use_kl_loss": False}, ALGORITHM + "use_kl_in_reward"),
            ({CORRECTION + "token_mask_is_threshold_high": 2.0}, ALGORITHM + "off_policy_correction"),
            ({"trainer.teacher.model.path": "teacher"}, "trainer.teacher.model.path"),
            (CRITIC, "trainer.critic.model.path"),
            ({"generator.n_samples_per_prompt": 1}, "generator.n_samples_per_prompt"),
        )
    ],
    "advantages_are_normalized_once": [
        (
            {ALGORITHM + "advantage_batch_normalize": True, ALGORITHM + "advantage_norm.mean_level": "group"},
            ALGORITHM + "advantage_batch_normalize",
        )
    ],
    "correction_needs_both_logprobs": [
        ({ALGORITHM + "old_logprobs": "engine", **compared}, ALGORITHM + "old_logprobs")
        for compared in ({ALGORITHM + "policy_loss_type": "decoupled"}, {CORRECTION + "tis_ratio_type": "token"})
    ],
    "corrections_suit_loss": [
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
    "reducing_losses_exclude_corrections": [
        ({ALGORITHM + "policy_loss_type": f"{OTHERS}:{name}", **correction}, ALGORITHM + "off_policy_correction")
        for name, correction in (
            ("skyrl_ppo", {CORRECTION + "tis_ratio_type": "token"}),
            ("verl_vanilla", {CORRECTION + "token_mask_is_threshold_low": 0.5}),
        )
    ],
    "correction_bounds_are_ordered": [
        ({CORRECTION + "geo_mask_low": 1.02}, CORRECTION + "geo_mask_low"),
        ({CORRECTION + "product_mask_high": 0.4}, CORRECTION + "product_mask_low"),
        (
            {CORRECTION + "token_mask_is_threshold_low": 2.0, CORRECTION + "token_mask_is_threshold_high": 0.5},
            CORRECTION + "token_mask_is_threshold_low",
        ),
    ],
    "sequence_loss_weighs_answers_equally": [
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
    "overlong_buffer_fits": [
        (
            {ALGORITHM + "reward_shaping.overlong.buffer_len": 1024},
            ALGORITHM + "reward_shaping.overlong.buffer_len",
        )
    ],
    "loss_needs_engine_logprobs": [
        ({**reader, "generator.sampling_params.logprobs": None}, "generator.sampling_params.logprobs")
        for reader in ({ALGORITHM + "old_logprobs": "engine"}, {ALGORITHM + "policy_loss_type": "decoupled"})
    ],
    "policy_teaches_with_hint": [
        ({ITSELF: True}, ITSELF),
        ({ITSELF: True, HINT: "column", "trainer.teacher.model.path": "teacher"}, ITSELF),
    ],
    "moving_teacher_is_the_policy": [
        ({MOVES: 0.05, "trainer.teacher.model.path": "teacher"}, MOVES),
        ({**OWN_AVERAGE, ALGORITHM + "distillation.type": "loss"}, MOVES),
    ],
    "hints_find_prompts": [
        ({ITSELF: True, HINT: "success", "generator.n_samples_per_prompt": 1}, HINT),
        ({ITSELF: True, HINT: "column", "environment.agent.function": "agents.py:play"}, HINT),
    ],
    "hints_go_with_teachers_tokens": [
        (
            {
                ITSELF: True,
                HINT: "feedback",
                ALGORITHM + "distillation.type": "loss",
                ALGORITHM + "distillation.top_k": 8,
                ALGORITHM + "distillation.top_k_of": "union",
            },
            ALGORITHM + "distillation.top_k_of",
        )
    ],
    "group_advantages_need_several_samples": [
        ({"generator.n_samples_per_prompt": 1}, "generator.n_samples_per_prompt")
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "moving_teacher_is_the_policy": OWN_AVERAGE,
    "pairs_replace_advantages": PAIRS,
    "gae_needs_critic": {"trainer.algorithm.advantage_estimator": "gae", "trainer.critic.model.path": "critic"},
    "kl_is_counted_once": {"trainer.algorithm.use_kl_in_reward": True, "trainer.algorithm.use_kl_loss": False},
    "critic_values_are_read": {**CRITIC, ALGORITHM + "advantage_estimator": "gae"},
    "advantages_are_normalized_once": {ALGORITHM + "advantage_norm.mean_level": "group"},
    "correction_needs_both_logprobs": {ALGORITHM + "old_logprobs": "engine"},
    "corrections_suit_loss": {
        ALGORITHM + "policy_loss_type": "cispo",
        CORRECTION + "tis_ratio_type": "token",
    },
    "reducing_losses_exclude_corrections": {ALGORITHM + "policy_loss_type": f"{OTHERS}:skyrl_ppo"},
    "correction_bounds_are_ordered": {CORRECTION + "token_mask_is_threshold_low": 2.0},
    "sequence_loss_weighs_answers_equally": {
        ALGORITHM + "policy_loss_type": "gspo",
        ALGORITHM + "loss_reduction": "sequence_mean",
    },
    "policy_teaches_with_hint": {ITSELF: True, HINT: "feedback"},
    "hints_find_prompts": {HINT: "success", "generator.n_samples_per_prompt": 1},  # without a teacher
    "remax_compares_raw_rewards": {ALGORITHM + "advantage_estimator": "remax"},
    "loss_needs_engine_logprobs": {"generator.sampling_params.logprobs": None},
    "overlong_buffer_fits": {ALGORITHM + "reward_shaping.overlong.buffer_len": 256},
}
