"""Cases of the checks in `skyrl.config.checks.rollouts`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import TURNS, VLLM

KWARGS = "generator.inference_engine.engine_init_kwargs"
STEPS: dict[str, Any] = {"generator.step_wise_trajectories": True}
ANEW: dict[str, Any] = {"generator.chat_template.name_or_path": "qwen3_with_thinking", "generator.max_turns": 2}

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "batched_sampling_ignores_flight_limit": [
        (
            {"generator.batched": True, "generator.max_trajectories_in_flight": 8},
            "generator.max_trajectories_in_flight",
        )
    ],
    "several_turns_have_room": [({"generator.max_turns": 2}, "generator.max_input_length")],
    "second_turns_are_allowed": [
        ({"environment.env_class": name}, "generator.max_turns")
        for name in ("gsm8k_multi_turn", "multiply", "search", "searchcode", "text2sql")
    ],
    "batched_sampling_has_one_turn": [
        ({"generator.batched": True, "generator.max_turns": 2}, "generator.batched"),
        ({"generator.batched": True, **STEPS}, "generator.batched"),
        ({"generator.batched": True, "generator.chat_template_kwargs": {"a": 1}}, "generator.chat_template_kwargs"),
    ],
    "step_wise_excludes_discounting": [
        ({**STEPS, "trainer.algorithm.advantage_estimator": "gae"}, "trainer.algorithm.advantage_estimator"),
        ({**STEPS, "trainer.algorithm.advantage_estimator": "reinforce++"}, "trainer.algorithm.advantage_estimator"),
        ({**STEPS, "trainer.algorithm.loss_reduction": "token_mean_legacy"}, "trainer.algorithm.loss_reduction"),
        ({**STEPS, "generator.chat_template.name_or_path": "x"}, "generator.chat_template.name_or_path"),
        ({**STEPS, "generator.use_conversation_multi_turn": False}, "generator.use_conversation_multi_turn"),
    ],
    "chat_template_is_built_in": [
        ({"generator.chat_template.name_or_path": "qwen4"}, "generator.chat_template.name_or_path")
    ],
    "merging_needs_step_wise_trajectories": [
        ({"generator.merge_stepwise_output": True}, "generator.merge_stepwise_output")
    ],
    "returns_need_single_sample_trajectories": [
        ({**ANEW, "trainer.algorithm.advantage_estimator": "reinforce++"}, "trainer.algorithm.advantage_estimator"),
        ({**ANEW, "trainer.algorithm.loss_reduction": "token_mean_legacy"}, "trainer.algorithm.loss_reduction"),
        ({**STEPS, "generator.max_turns": 2, "trainer.critic.model.path": "x"}, "trainer.critic.model.path"),
    ],
    "completion_lengths_are_consistent": [
        ({"generator.sampling_params.min_new_tokens": 1025}, "generator.sampling_params.min_new_tokens"),
        ({"generator.sampling_params.max_tokens": 512}, "generator.sampling_params.max_tokens"),
        ({"generator.eval_sampling_params.max_tokens": 512}, "generator.eval_sampling_params.max_tokens"),
    ],
    "turns_end_with_eos": [
        (
            {
                "generator.max_turns": 2,
                "generator.sampling_params.stop": ["</a>"],
                "generator.append_eos_token_after_stop_str_in_multi_turn": False,
            },
            "generator.append_eos_token_after_stop_str_in_multi_turn",
        )
    ],
    "engine_rope_matches_learner": [
        ({"trainer.rope_theta": 1e4, "generator.rope_theta": 1e6}, "generator.rope_theta"),
        ({"generator.rope_scaling": {"factor": 2.0}}, "generator.rope_scaling"),
    ],
    "rope_excludes_engine_arguments": [
        ({KWARGS: {"rope_scaling": {}}}, f"{KWARGS}.rope_scaling"),
        ({KWARGS: {"rope_theta": 1e4}}, f"{KWARGS}.rope_theta"),
        ({KWARGS: {"hf_overrides": {"rope_scaling": {}}}}, f"{KWARGS}.hf_overrides.rope_scaling"),
        (
            {
                KWARGS: {"hf_overrides": {"rope_parameters": {"factor": 2.0}}},
                "trainer.policy.model_config_kwargs": {"rope_parameters": {"factor": 4.0}},
            },
            f"{KWARGS}.hf_overrides.rope_parameters",
        ),
    ],
    # 512 tokens of prompt and 1,024 of answer
    "sequence_fits_engine": [
        ({**VLLM, KWARGS: {"max_model_len": 1535}}, f"{KWARGS}.max_model_len"),
        (
            {"generator.inference_engine.backend": "sglang", KWARGS: {"context_length": 1535}},
            f"{KWARGS}.context_length",
        ),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "batched_sampling_ignores_flight_limit": {"generator.max_trajectories_in_flight": 8},
    "several_turns_have_room": TURNS,
    "second_turns_are_allowed": {"environment.env_class": "multiply", "generator.max_turns": 2},
    "batched_sampling_has_one_turn": {"generator.batched": True},
    "step_wise_excludes_discounting": {**STEPS, "trainer.algorithm.advantage_estimator": "rloo"},
    "turns_end_with_eos": {
        "generator.sampling_params.stop": ["</a>"],
        "generator.append_eos_token_after_stop_str_in_multi_turn": False,
    },
    "engine_rope_matches_learner": {"trainer.rope_theta": 1e4},
    "rope_excludes_engine_arguments": {
        KWARGS: {"hf_overrides": {"rope_parameters": {"factor": 4.0}}},
        "trainer.policy.model_config_kwargs": {"rope_parameters": {"factor": 4.0}},
    },
    "sequence_fits_engine": {**VLLM, KWARGS: {"max_model_len": 1536}},
}
