"""What the checks of rollouts and learners fire on: check -> what is written, and what the one problem is about."""

from __future__ import annotations

from typing import Any

GENERATOR = "generator."
KWARGS = "generator.inference_engine.engine_init_kwargs"
STEPS: dict[str, Any] = {"generator.step_wise_trajectories": True}
ANEW: dict[str, Any] = {"generator.chat_template.name_or_path": "qwen3_with_thinking", "generator.max_turns": 2}
MEGATRON: dict[str, Any] = {"trainer.strategy": "megatron", "generator.inference_engine.backend": "vllm"}
PROFILER = "trainer.policy.megatron_config.torch_profiler_config."
DEEPSPEED: dict[str, Any] = {"trainer.strategy": "deepspeed"}
ZERO = "trainer.policy.deepspeed_config.zero_optimization."
VLLM: dict[str, Any] = {"generator.inference_engine.backend": "vllm"}
EXTRA = "generator.sampling_params.additional_kwargs"
PRESCALE = "trainer.policy.deepspeed_config.prescale_gradients"
WRAP = "trainer.policy.fsdp_config.wrap_policy"
APART: dict[str, Any] = {"trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False}
LORA: dict[str, Any] = {"trainer.policy.model.lora.rank": 8}
INIT = "trainer.policy.model.lora.init_method"
REENTRANT = "trainer.gradient_checkpointing_use_reentrant"

ROLLOUT_CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "one_call_of_the_engine_has_one_turn": [
        ({"generator.batched": True, "generator.max_turns": 2}, "generator.batched"),
        ({"generator.batched": True, **STEPS}, "generator.batched"),
        ({"generator.batched": True, "generator.chat_template_kwargs": {"a": 1}}, "generator.chat_template_kwargs"),
    ],
    "steps_are_samples_that_can_be_compared": [
        ({**STEPS, "trainer.algorithm.advantage_estimator": "gae"}, "trainer.algorithm.advantage_estimator"),
        ({**STEPS, "trainer.algorithm.advantage_estimator": "reinforce++"}, "trainer.algorithm.advantage_estimator"),
        ({**STEPS, "trainer.algorithm.loss_reduction": "token_mean_legacy"}, "trainer.algorithm.loss_reduction"),
        ({**STEPS, "generator.chat_template.name_or_path": "x"}, "generator.chat_template.name_or_path"),
        ({**STEPS, "generator.use_conversation_multi_turn": False}, "generator.use_conversation_multi_turn"),
    ],
    "a_template_that_is_named_is_built_in": [
        ({"generator.chat_template.name_or_path": "qwen4"}, "generator.chat_template.name_or_path")
    ],
    "only_steps_can_be_merged": [({"generator.merge_stepwise_output": True}, "generator.merge_stepwise_output")],
    "several_samples_have_no_time_in_common": [
        ({**ANEW, "trainer.algorithm.advantage_estimator": "reinforce++"}, "trainer.algorithm.advantage_estimator"),
        ({**ANEW, "trainer.algorithm.loss_reduction": "token_mean_legacy"}, "trainer.algorithm.loss_reduction"),
        ({**STEPS, "generator.max_turns": 2, "trainer.critic.model.path": "x"}, "trainer.critic.model.path"),
    ],
    "a_completion_may_be_as_long_as_it_must": [
        ({"generator.sampling_params.min_new_tokens": 1025}, "generator.sampling_params.min_new_tokens"),
        ({"generator.sampling_params.max_tokens": 512}, "generator.sampling_params.max_tokens"),
        ({"generator.eval_sampling_params.max_tokens": 512}, "generator.eval_sampling_params.max_tokens"),
    ],
    "the_engine_has_the_sampling_arguments": [
        ({"generator.sampling_params.additional_kwargs": {"min_tokens": 2}}, EXTRA),  # torch has none
        ({**VLLM, "generator.sampling_params.additional_kwargs": {"best_of": 2}}, EXTRA),
        (
            {**VLLM, "generator.eval_sampling_params.additional_kwargs": {"min_token": 2}},
            "generator.eval_sampling_params.additional_kwargs",
        ),
    ],
    "turns_end_as_the_models_chats_do": [
        (
            {
                "generator.max_turns": 2,
                "generator.sampling_params.stop": ["</a>"],
                "generator.append_eos_token_after_stop_str_in_multi_turn": False,
            },
            "generator.append_eos_token_after_stop_str_in_multi_turn",
        )
    ],
    "both_sides_turn_positions_alike": [
        ({"trainer.rope_theta": 1e4, "generator.rope_theta": 1e6}, "generator.rope_theta"),
        ({"generator.rope_scaling": {"factor": 2.0}}, "generator.rope_scaling"),
    ],
    "positions_are_set_in_one_place": [
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
    "a_sequence_fits_into_the_engine": [({KWARGS: {"max_model_len": 1535}}, f"{KWARGS}.max_model_len")],
}

ASYNC = "trainer.fully_async."
ON: dict[str, Any] = {ASYNC + "enabled": True, "trainer.algorithm.policy_loss_type": "decoupled"}
KEPT: dict[str, Any] = {**ON, ASYNC + "clear_kv_cache_on_weight_sync": False}

ASYNC_CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "a_queue_holds_a_batch": [({**ON, ASYNC + "queue_size": 100}, ASYNC + "queue_size")],
    "weights_travel_before_samples_are_too_old": [
        ({**ON, ASYNC + "steps_per_sync": 6}, ASYNC + "steps_per_sync"),
        ({**ON, ASYNC + "steps_per_sync": 2, ASYNC + "max_staleness_steps": 0}, ASYNC + "steps_per_sync"),
    ],
    "a_stream_is_not_one_call": [({**ON, "generator.batched": True}, "generator.batched")],
    "kept_keys_and_values_are_not_shared": [
        ({**KEPT, "generator.inference_engine.backend": "vllm"}, ASYNC + "clear_kv_cache_on_weight_sync"),
    ],
    "kept_keys_and_values_outlive_the_engines_sleep": [
        (
            {
                **KEPT,
                "generator.inference_engine.backend": "vllm",
                "generator.inference_engine.enable_prefix_caching": False,
            },
            ASYNC + "clear_kv_cache_on_weight_sync",
        ),
    ],
    "older_samples_are_corrected": [({ASYNC + "enabled": True}, "trainer.algorithm.policy_loss_type")],
}

LEARNER_CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "adapters_have_a_road_to_the_engines": [
        (
            {**LORA, "generator.inference_engine.weight_sync_backend": "delta"},
            "generator.inference_engine.weight_sync_backend",
        ),
        ({**LORA, "generator.inference_engine.backend": "sglang"}, "generator.inference_engine.backend"),
    ],
    "adapters_start_in_a_way_that_runs": [
        ({**LORA, INIT: "pissa"}, INIT),
        ({"trainer.policy.model.lora.rank": 3, INIT: "orthogonal"}, INIT),
    ],
    "adapters_are_reached_by_gradients": [
        (
            {**LORA, "trainer.recompute_activations": True, REENTRANT: True},
            REENTRANT,
        ),
    ],
    "traces_have_ranks_and_a_folder": [
        ({**MEGATRON, PROFILER + "enable": True, PROFILER + "save_path": "traces"}, PROFILER + "ranks"),
        ({**MEGATRON, PROFILER + "enable": True, PROFILER + "ranks": [0]}, PROFILER + "save_path"),
        (
            {**MEGATRON, PROFILER + "enable": True, PROFILER + "ranks": [0], PROFILER + "save_path": "s3://x"},
            PROFILER + "save_path",
        ),
    ],
    "gathering_overlaps_with_reducing": [
        (
            {**MEGATRON, "trainer.policy.megatron_config.ddp_config.overlap_param_gather": True},
            "trainer.policy.megatron_config.ddp_config.overlap_param_gather",
        )
    ],
    "state_on_a_drive_has_a_folder": [
        ({**DEEPSPEED, ZERO + "offload_optimizer.device": "nvme"}, ZERO + "offload_optimizer.nvme_path"),
        (
            {
                **DEEPSPEED,
                ZERO + "stage": 2,
                ZERO + "offload_optimizer.device": "nvme",
                ZERO + "offload_optimizer.nvme_path": "/drive",
            },
            ZERO + "offload_optimizer.device",
        ),
    ],
    "modules_are_named_in_a_list": [
        ({**LORA, "trainer.policy.model.lora.exclude_modules": "q_proj"}, "trainer.policy.model.lora.exclude_modules"),
        ({**LORA, "trainer.policy.model.lora.target_modules": "q_proj"}, "trainer.policy.model.lora.target_modules"),
        ({**LORA, "trainer.policy.model.lora.target_modules": "*_proj"}, "trainer.policy.model.lora.target_modules"),
    ],
    "units_of_sharding_are_named_as_fsdp_reads_them": [
        ({WRAP: {"min_num_params": 100}}, WRAP),
        ({WRAP: {"transformer_layer_cls_to_wrap": [1]}}, WRAP),
    ],
    "gradients_are_divided_where_deepspeed_can": [
        ({**DEEPSPEED, PRESCALE: True}, PRESCALE),
        ({**DEEPSPEED, PRESCALE: True, ZERO + "stage": 2}, PRESCALE),
    ],
    "buckets_of_weights_are_aligned": [
        ({**DEEPSPEED, ZERO + "stage": 1, ZERO + "allgather_bucket_size": 7}, ZERO + "allgather_bucket_size")
    ],
    "second_copies_of_the_weights_are_whole": [
        (
            {
                **DEEPSPEED,
                **APART,
                "trainer.placement.policy_num_gpus_per_node": 4,
                ZERO + "zero_hpz_partition_size": 3,
            },
            ZERO + "zero_hpz_partition_size",
        )
    ],
    "integers_are_made_on_gpus": [
        ({**DEEPSPEED, ZERO + "zero_quantized_weights": True}, ZERO + "zero_quantized_weights"),
        ({**DEEPSPEED, ZERO + "zero_quantized_gradients": True}, ZERO + "zero_quantized_gradients"),
    ],
}

SILENT_CASES: dict[str, dict[str, Any]] = {
    "the_engine_has_the_sampling_arguments": {**VLLM, EXTRA: {"min_tokens": 2}},
    "a_queue_holds_a_batch": {**ON, ASYNC + "queue_size": 1024},
    "weights_travel_before_samples_are_too_old": {**ON, ASYNC + "steps_per_sync": 5},
    "a_stream_is_not_one_call": {"generator.batched": True},
    "kept_keys_and_values_are_not_shared": {
        **KEPT,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.enable_prefix_caching": False,
        "trainer.placement.colocate_all": False,
    },
    "kept_keys_and_values_outlive_the_engines_sleep": {**KEPT, "generator.inference_engine.backend": "torch"},
    "older_samples_are_corrected": {ASYNC + "enabled": True, ASYNC + "max_staleness_steps": 0},
    "one_call_of_the_engine_has_one_turn": {"generator.batched": True},
    "steps_are_samples_that_can_be_compared": {**STEPS, "trainer.algorithm.advantage_estimator": "rloo"},
    "turns_end_as_the_models_chats_do": {
        "generator.sampling_params.stop": ["</a>"],
        "generator.append_eos_token_after_stop_str_in_multi_turn": False,
    },
    "both_sides_turn_positions_alike": {"trainer.rope_theta": 1e4},
    "positions_are_set_in_one_place": {
        KWARGS: {"hf_overrides": {"rope_parameters": {"factor": 4.0}}},
        "trainer.policy.model_config_kwargs": {"rope_parameters": {"factor": 4.0}},
    },
    "a_sequence_fits_into_the_engine": {KWARGS: {"max_model_len": 1536}},
    "adapters_have_a_road_to_the_engines": LORA,
    "adapters_start_in_a_way_that_runs": {**LORA, INIT: "orthogonal"},
    "adapters_are_reached_by_gradients": {**LORA, "trainer.recompute_activations": True},
    "traces_have_ranks_and_a_folder": {
        **MEGATRON,
        PROFILER + "enable": True,
        PROFILER + "ranks": [0],
        PROFILER + "save_path": "traces",
    },
    "state_on_a_drive_has_a_folder": {
        "trainer.strategy": "deepspeed",
        ZERO + "offload_optimizer.device": "nvme",
        ZERO + "offload_optimizer.nvme_path": "/drive",
    },
    "modules_are_named_in_a_list": {**LORA, "trainer.policy.model.lora.exclude_modules": ["q_proj"]},
    "units_of_sharding_are_named_as_fsdp_reads_them": {WRAP: {"transformer_layer_cls_to_wrap": ["QwenDecoderLayer"]}},
    "gradients_are_divided_where_deepspeed_can": {**DEEPSPEED, PRESCALE: True, ZERO + "stage": 0},
    "buckets_of_weights_are_aligned": {**DEEPSPEED, ZERO + "stage": 1, ZERO + "allgather_bucket_size": 8},
    "second_copies_of_the_weights_are_whole": {
        **DEEPSPEED,
        **APART,
        "trainer.placement.policy_num_gpus_per_node": 4,
        ZERO + "zero_hpz_partition_size": 2,
    },
    "integers_are_made_on_gpus": {**DEEPSPEED, "trainer.device": "cuda", ZERO + "zero_quantized_weights": True},
}

SAMPLING = "generator.sampling_params."
RATE = "trainer.policy.optimizer_config.lr"
WARMUP = "trainer.policy.optimizer_config.num_warmup_steps"
CAP = "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high"
RATIOS: dict[str, Any] = {"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"}
HALF = "generator.inference_engine.model_dtype"
SHARE = "generator.inference_engine.gpu_memory_utilization"
CUDA: dict[str, Any] = {"trainer.device": "cuda"}
BUDGET = "trainer.max_tokens_per_microbatch"

PLAUSIBLE_CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "training_samples_are_drawn_from_the_whole_distribution": [
        ({SAMPLING + "top_p": 0.9}, SAMPLING + "top_p"),
        ({SAMPLING + "top_k": 50}, SAMPLING + "top_k"),
        ({SAMPLING + "min_p": 0.1}, SAMPLING + "min_p"),
    ],
    "training_samples_are_not_noise": [({SAMPLING + "temperature": 100.0}, SAMPLING + "temperature")],
    "a_kl_penalty_has_a_weight": [({"trainer.algorithm.kl_loss_coef": 0.0}, "trainer.algorithm.kl_loss_coef")],
    "importance_ratios_are_not_cut_below_one": [({**RATIOS, CAP: 0.5}, CAP)],
    "learning_rates_are_those_of_fine_tuning": [({RATE: 10.0}, RATE)],
    # 1,024 prompts in mini-batches of 256: 4 optimizer steps in each of 3 training steps
    "warm_up_ends_before_the_run_does": [({"trainer.max_training_steps": 3, WARMUP: 12}, WARMUP)],
    "the_longest_sequence_fits_into_a_micro_batch": [({BUDGET: 1535}, BUDGET)],  # 512 of prompt and 1,024 of answer
    "engine_and_learner_compute_in_the_same_type": [({**CUDA, HALF: "float16"}, HALF)],
    "engines_leave_memory_to_the_learner": [({**CUDA, SHARE: 1.0}, SHARE)],
    "evaluation_is_on_other_data": [({"data.train_data": ["a", "b"], "data.val_data": ["b"]}, "data.val_data")],
    "checkpoints_and_exports_have_folders_of_their_own": [
        ({"trainer.ckpt_path": "x", "trainer.export_path": "x/"}, "trainer.export_path")
    ],
    "a_run_name_is_the_name_of_a_folder": [
        ({"trainer.run_name": "../../x"}, "trainer.run_name"),
        ({"trainer.run_name": ""}, "trainer.run_name"),
    ],
}

PLAUSIBLE_SILENT: dict[str, dict[str, Any]] = {
    "training_samples_are_drawn_from_the_whole_distribution": {"generator.eval_sampling_params.top_p": 0.9},
    "training_samples_are_not_noise": {SAMPLING + "temperature": 2.0},
    "a_kl_penalty_has_a_weight": {"trainer.algorithm.kl_loss_coef": 0.0, "trainer.algorithm.use_kl_loss": False},
    "importance_ratios_are_not_cut_below_one": {CAP: 0.5},
    "learning_rates_are_those_of_fine_tuning": {RATE: 0.1},
    "warm_up_ends_before_the_run_does": {"trainer.max_training_steps": 3, WARMUP: 11},
    "the_longest_sequence_fits_into_a_micro_batch": {BUDGET: 1536},
    "engine_and_learner_compute_in_the_same_type": {**CUDA, HALF: "bfloat16"},
    "engines_leave_memory_to_the_learner": {**CUDA, SHARE: 0.9},
    "evaluation_is_on_other_data": {"data.train_data": ["a"], "data.val_data": ["b"]},
    "checkpoints_and_exports_have_folders_of_their_own": {"trainer.run_path": "x"},
    "a_run_name_is_the_name_of_a_folder": {"trainer.run_name": "", "trainer.run_path": "x"},
}

OPTIMIZER = "trainer.policy.optimizer_config."

EDGES: list[tuple[str, dict[str, Any]]] = [
    # further runs on which a check is silent: the last value before it fires, or one of two that do not go together
    ("importance_ratios_are_not_cut_below_one", {**RATIOS, CAP: 1.0}),
    ("the_schedules_have_what_they_need", {OPTIMIZER + "num_warmup_steps": 3}),
    ("the_schedules_have_what_they_need", {OPTIMIZER + "warmup_steps_proportion": 0.1}),
]
