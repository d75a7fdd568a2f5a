"""Checks: each one fires where it should, is silent where it should, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, check, compose, load
from skyrl.config.checks.batches import BATCH_CHECKS
from skyrl.config.checks.schedule import WITHOUT_FIELDS
from skyrl.config.kinds import RL
from skyrl.config.resolve import resolve_with_origins
from skyrl.config.unimplemented import UNIMPLEMENTED, UNIMPLEMENTED_VALUES, Unimplemented
from skyrl.errors import ConfigError, Problem
from skyrl.tree import FrozenDict, evolve_at, get_at
from skyrl.tree.classes import table_paths
from skyrl.tree.rules import paths_read
from tests.config.check_cases import (
    ASYNC_CASES,
    EDGES,
    LEARNER_CASES,
    PLAUSIBLE_CASES,
    PLAUSIBLE_SILENT,
    ROLLOUT_CASES,
    SILENT_CASES,
)
from tests.config.leaves import LEAVES, OTHERS, RUNNABLE

PLACEMENT = "trainer.placement."
ENGINE = "generator.inference_engine."
RAY: dict[str, Any] = {PLACEMENT + "executor": "ray"}
APART: dict[str, Any] = {**RAY, PLACEMENT + "colocate_all": False, PLACEMENT + "colocate_policy_ref": False}
TURNS = {"generator.max_turns": 2, "generator.max_input_length": 2000}
STOPPED = {"generator.sampling_params.stop": ["</s>"]}
CLOSES = "generator.append_eos_token_after_stop_str_in_multi_turn"
VLLM: dict[str, Any] = {**RAY, ENGINE + "backend": "vllm"}
MEGATRON: dict[str, Any] = {**VLLM, "trainer.strategy": "megatron"}
NO_KL: dict[str, Any] = {"trainer.algorithm.use_kl_loss": False}
CRITIC: dict[str, Any] = {"trainer.critic.model.path": "critic"}
ALGORITHM = "trainer.algorithm."
SEARCH_URL = "environment.skyrl_gym.search.search_url"
CORRECTION = ALGORITHM + "off_policy_correction."


def gpus(number: int, *models: str) -> dict[str, Any]:
    """So many GPUs on one node for each of the models."""
    return {f"{PLACEMENT}{model}_num_gpus_per_node": number for model in models}


def split(tensor: int, pipeline: int, context: int) -> dict[str, Any]:
    """How Megatron splits the policy."""
    sizes = {"tensor_model": tensor, "pipeline_model": pipeline, "context": context}
    return {f"trainer.policy.megatron_config.{name}_parallel_size": size for name, size in sizes.items()}


PATHS = set(LEAVES) | set(table_paths(SkyRLTrainConfig))

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    # check: what is written, and what the problem is about
    "the_policy_has_a_model": [
        ({"trainer.policy.model.path": None}, "trainer.policy.model.path"),
        ({"trainer.policy.model.path": ""}, "trainer.policy.model.path"),
    ],
    "there_is_data_to_train_on": [({"data.train_data": []}, "data.train_data")],
    "evaluation_has_data": [
        ({"data.val_data": [], "trainer.eval_interval": -1}, "data.val_data"),
        ({"data.val_data": [], "trainer.eval_before_train": False}, "data.val_data"),
    ],
    "recorded_samples_evaluate_nothing": [({"trainer.rollouts_from": "runs/other"}, "trainer.rollouts_from")],
    "mini_batches_divide_the_batch": [({"trainer.policy_mini_batch_size": 300}, "trainer.policy_mini_batch_size")],
    "critic_mini_batches_divide_the_batch": [
        (
            {"trainer.critic_mini_batch_size": 300, "trainer.critic.model.path": "critic"},
            "trainer.critic_mini_batch_size",
        )
    ],
    "micro_batches_divide_the_mini_batch": [
        ({"trainer.micro_train_batch_size_per_gpu": 3}, "trainer.micro_train_batch_size_per_gpu"),
        # 1,280 samples on 8 ranks are 160 for each, which 64 does not divide though it divides 1,280
        ({**gpus(8, "policy"), "trainer.micro_train_batch_size_per_gpu": 64}, "trainer.micro_train_batch_size_per_gpu"),
        # the policy's 1,280 are a multiple of 256, the critic's 128 x 5 = 640 are not
        (
            {
                **CRITIC,
                "trainer.critic_mini_batch_size": 128,
                "trainer.micro_train_batch_size_per_gpu": 256,
            },
            "trainer.micro_train_batch_size_per_gpu",
        ),
    ],
    "ranks_form_whole_groups": [
        (
            {**gpus(6, role), **CRITIC, f"trainer.{role}.sequence_parallel_size": 4},
            f"trainer.{role}.sequence_parallel_size",
        )
        for role in ("policy", "critic", "ref")
    ]
    + [
        ({**MEGATRON, **gpus(12, "policy"), **split(2, 2, 2)}, "trainer.policy.megatron_config"),
        (
            {**MEGATRON, **gpus(3, "ref"), "trainer.ref.megatron_config.tensor_model_parallel_size": 2},
            "trainer.ref.megatron_config",
        ),
    ],
    "mini_batches_deal_out_evenly": [
        (gpus(3, "policy"), "trainer.policy_mini_batch_size"),
        ({**gpus(3, "critic"), **CRITIC}, "trainer.critic_mini_batch_size"),
        # fewer samples than ranks
        (
            {**gpus(8, "policy"), "trainer.policy_mini_batch_size": 1, "trainer.train_batch_size": 8},
            "trainer.policy_mini_batch_size",
        ),
        # 1,280 samples go to 4 groups of 3 ranks that share sequences, but not to 12 ranks
        (gpus(12, "policy"), "trainer.policy_mini_batch_size"),
    ],
    "the_reference_scores_equal_shares": [(gpus(3, "ref"), "trainer.train_batch_size")],
    "models_that_share_gpus_have_as_many": [
        ({**RAY, **CRITIC, f"{PLACEMENT}{role}_{count}": 2}, f"{PLACEMENT}{role}_{count}")
        for role in ("critic", "ref")
        for count in ("num_nodes", "num_gpus_per_node")
    ]
    + [({**RAY, PLACEMENT + "colocate_all": False, **gpus(2, "ref")}, PLACEMENT + "ref_num_gpus_per_node")],
    "engines_that_share_gpus_take_all_of_them": [
        ({**RAY, **gpus(2, "policy")}, ENGINE + "num_engines"),
        ({**VLLM, **gpus(4, "policy"), ENGINE + "tensor_parallel_size": 2}, ENGINE + "num_engines"),
        ({**VLLM, **gpus(4, "policy"), ENGINE + "tensor_parallel_size": 3}, ENGINE + "num_engines"),
    ],
    "engines_of_others_share_no_gpus": [
        ({**VLLM, ENGINE + "run_engines_locally": False}, PLACEMENT + "colocate_all"),
        ({**VLLM, ENGINE + "external_proxy_url": "http://router"}, PLACEMENT + "colocate_all"),
        ({**VLLM, ENGINE + "remote_urls": ["host:1"]}, PLACEMENT + "colocate_all"),
        ({**RAY, ENGINE + "backend": "http"}, PLACEMENT + "colocate_all"),
    ],
    "engines_of_others_have_an_address": [
        ({ENGINE + "run_engines_locally": False}, ENGINE + "external_server_urls"),
        ({ENGINE + "backend": "http"}, ENGINE + "external_server_urls"),
    ],
    "experts_take_every_gpu_of_an_engine": [
        ({**VLLM, ENGINE + "expert_parallel_size": 2}, ENGINE + "expert_parallel_size"),
        # pipeline stages hold different experts
        (
            {
                **VLLM,
                ENGINE + "expert_parallel_size": 4,
                ENGINE + "tensor_parallel_size": 2,
                ENGINE + "pipeline_parallel_size": 2,
            },
            ENGINE + "expert_parallel_size",
        ),
    ],
    "an_engine_of_child_processes_has_one_node": [
        (
            {
                **VLLM,
                PLACEMENT + "policy_num_nodes": 2,
                ENGINE + "distributed_executor_backend": "mp",
                ENGINE + "tensor_parallel_size": 2,
            },
            ENGINE + "distributed_executor_backend",
        ),
        # engine 1 of 3 would have GPUs 4 and 5 of node 0 and 0 and 1 of node 1
        (
            {
                **VLLM,
                **gpus(6, "policy"),
                PLACEMENT + "policy_num_nodes": 2,
                ENGINE + "distributed_executor_backend": "mp",
                ENGINE + "tensor_parallel_size": 4,
                ENGINE + "num_engines": 3,
            },
            ENGINE + "distributed_executor_backend",
        ),
    ],
    "copies_of_the_weights_are_whole": [
        (
            {**CRITIC, **gpus(8, role), f"trainer.{role}.fsdp_config.fsdp_size": size},
            f"trainer.{role}.fsdp_config.fsdp_size",
        )
        for role, size in (("policy", 3), ("critic", 16), ("ref", 5))
    ],
    "weights_stay_sharded_over_part_of_a_copy": [
        (
            {**gpus(8, "policy"), "trainer.policy.fsdp_config.reshard_after_forward": 3},
            "trainer.policy.fsdp_config.reshard_after_forward",
        ),
        # 8 divides the ranks, but a copy has 4
        (
            {
                **gpus(8, "ref"),
                "trainer.ref.fsdp_config.fsdp_size": 4,
                "trainer.ref.fsdp_config.reshard_after_forward": 8,
            },
            "trainer.ref.fsdp_config.reshard_after_forward",
        ),
    ],
    "megatron_has_no_critic": [({**MEGATRON, **CRITIC}, "trainer.critic.model.path")],
    "megatron_feeds_vllm": [({"trainer.strategy": "megatron"}, ENGINE + "backend")],
    "megatron_sends_weights_between_gpus": [
        ({**MEGATRON, ENGINE + "weight_sync_backend": "gloo"}, ENGINE + "weight_sync_backend")
    ],
    "megatron_splits_sequences_by_context": [
        ({**MEGATRON, f"trainer.{role}.sequence_parallel_size": 2}, f"trainer.{role}.sequence_parallel_size")
        for role in ("policy", "ref")
    ],
    "context_parallel_samples_are_packed": [
        (
            {
                **MEGATRON,
                "trainer.use_sample_packing": False,
                f"trainer.{role}.megatron_config.context_parallel_size": 2,
            },
            f"trainer.{role}.megatron_config.context_parallel_size",
        )
        for role in ("policy", "ref")
    ],
    "several_evaluation_samples_differ": [
        ({"generator.eval_n_samples_per_prompt": 4}, "generator.eval_n_samples_per_prompt")
    ],
    "every_training_source_has_a_weight": [({"data.train_weights": [1.0, 2.0]}, "data.train_weights")],
    "no_source_is_named_twice": [
        ({"data.train_data": ["a.parquet", "b.parquet", "a.parquet"]}, "data.train_data"),
        ({"data.val_data": ["a.parquet", "a.parquet"]}, "data.val_data"),
    ],
    "mini_batches_in_samples_are_those_in_prompts": [
        ({f"trainer.{role}_mini_batch_size_in_samples": 5}, f"trainer.{role}_mini_batch_size_in_samples")
        for role in ("policy", "critic")
    ],
    "the_schedules_have_what_they_need": [
        ({"trainer.policy.optimizer_config.scheduler": name}, "trainer.policy.optimizer_config.scheduler")
        for name in WITHOUT_FIELDS
    ]
    + [
        (
            {
                "trainer.policy.optimizer_config.num_warmup_steps": 3,
                "trainer.policy.optimizer_config.warmup_steps_proportion": 0.1,
            },
            "trainer.policy.optimizer_config.warmup_steps_proportion",
        )
    ],
    "a_reward_model_is_somewhere": [
        ({"environment.env_class": "reward_model"}, "environment.skyrl_gym.reward_model.path"),
        (
            {
                "environment.env_class": "reward_model",
                "environment.skyrl_gym.reward_model.path": "rm",
                "environment.skyrl_gym.reward_model.url": "http://127.0.0.1:8001/score",
            },
            "environment.skyrl_gym.reward_model.url",
        ),
    ],
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
    "the_learner_scores_at_the_rollout_temperature": [
        ({"trainer.algorithm.temperature": 0.9}, "trainer.algorithm.temperature")
    ],
    "training_samples_are_random": [
        ({"generator.sampling_params.temperature": 0}, "generator.sampling_params.temperature")
    ],
    "the_learner_can_score_what_was_sampled": [
        ({"generator.sampling_params.repetition_penalty": 1.1}, "generator.sampling_params.repetition_penalty"),
        ({"generator.sampling_params.frequency_penalty": 0.5}, "generator.sampling_params.frequency_penalty"),
        ({"generator.sampling_params.min_new_tokens": 1}, "generator.sampling_params.min_new_tokens"),
    ],
    "the_environment_is_known": [({"environment.env_class": "rlm"}, "environment.env_class")],
    "a_group_has_something_to_compare": [({"generator.n_samples_per_prompt": 1}, "generator.n_samples_per_prompt")],
    "a_single_turn_is_given_the_prompt": [
        ({"generator.max_input_length": 511}, "generator.max_input_length"),
        ({"generator.max_input_length": 513}, "generator.max_input_length"),
        ({"generator.max_input_length": 511, "generator.max_turns": 2}, "generator.max_input_length"),
    ],
    "a_batch_at_once_is_in_flight_at_once": [
        (
            {"generator.batched": True, "generator.max_trajectories_in_flight": 8},
            "generator.max_trajectories_in_flight",
        )
    ],
    "several_turns_have_room": [({"generator.max_turns": 2}, "generator.max_input_length")],
    "alarms_can_be_raised": [
        ({"trainer.alarms": [{"name": "mine"}]}, "trainer.alarms"),
        ({"trainer.alarms": [{"metric": "a"}, {"metric": "b", "name": "a"}]}, "trainer.alarms"),
    ],
    "a_resumed_run_has_a_path": [
        ({"trainer.resume_mode": "from_path"}, "trainer.resume_path"),
        ({"trainer.resume_path": "ckpts/global_step_1"}, "trainer.resume_path"),
    ],
    "recovery_and_resuming_agree": [
        (
            {
                "trainer.recover_mode": mode,
                "trainer.resume_mode": "from_path",
                "trainer.resume_path": "ckpts/global_step_1",
            },
            "trainer.recover_mode",
        )
        for mode in ("auto", "fault")
    ]
    + [({"trainer.recover_mode": "resume", "trainer.resume_mode": "none"}, "trainer.recover_mode")],
    "the_best_checkpoints_have_a_measure": [
        ({"trainer.ckpt_keep_best": 2, "trainer.max_ckpts_to_keep": 1}, "trainer.ckpt_best_metric")
    ],
    "one_process_has_one_rank": [
        ({"trainer.placement.executor": "in_process", path: 2}, path)
        for path in (
            "trainer.placement.policy_num_nodes",
            "trainer.placement.policy_num_gpus_per_node",
            "trainer.placement.ref_num_nodes",
            "trainer.placement.ref_num_gpus_per_node",
            "generator.inference_engine.num_engines",
        )
    ]
    + [
        ({PLACEMENT + "executor": "in_process", **CRITIC, **gpus(2, "critic")}, PLACEMENT + "critic_num_gpus_per_node"),
        (
            {PLACEMENT + "executor": "in_process", ENGINE + "backend": "vllm", ENGINE + "tensor_parallel_size": 2},
            ENGINE + "tensor_parallel_size",
        ),
    ],
    "nccl_is_vllms": [
        ({**RAY, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"}, ENGINE + "weight_sync_backend")
    ],
    "samples_of_rounded_weights_are_corrected": [({ENGINE + "rollout_dtype": "bfloat16"}, ENGINE + "rollout_dtype")],
    "nccl_has_cuda": [({**RAY, ENGINE + "weight_sync_backend": "nccl"}, ENGINE + "weight_sync_backend")],
    "vllm_on_a_cpu_computes_eagerly": [({**VLLM, ENGINE + "enforce_eager": False}, ENGINE + "enforce_eager")],
    "vllm_on_a_cpu_promises_no_repetition": [
        ({**VLLM, ENGINE + "deterministic": True}, ENGINE + "deterministic"),
        ({**VLLM, "trainer.deterministic": True}, ENGINE + "deterministic"),
    ],
    "parts_of_an_engine_on_a_cpu_are_child_processes": [
        ({**VLLM, ENGINE + f"{kind}_parallel_size": 2}, ENGINE + "distributed_executor_backend")
        for kind in ("tensor", "pipeline", "data")
    ],
    "copies_inside_an_engine_are_asynchronous": [
        ({**VLLM, ENGINE + "async_engine": False, ENGINE + "data_parallel_size": 2}, ENGINE + "data_parallel_size")
    ],
    "statistics_come_from_the_asynchronous_engine": [
        (
            {**VLLM, ENGINE + "async_engine": False, ENGINE + "enable_ray_prometheus_stats": True},
            ENGINE + "enable_ray_prometheus_stats",
        )
    ],
    "every_sequence_of_a_step_has_a_token": [
        ({**VLLM, ENGINE + "max_num_batched_tokens": 1023}, ENGINE + "max_num_batched_tokens"),
        ({**VLLM, ENGINE + "max_num_seqs": 8193}, ENGINE + "max_num_batched_tokens"),
    ],
    "repeatable_runs_are_promised_on_a_cpu": [
        ({"trainer.deterministic": True, "trainer.device": "cuda"}, "trainer.deterministic")
    ],
}


SILENT: dict[str, dict[str, Any]] = {
    "the_environment_is_known": {"environment.env_class": "mine.py:Mine"},
    # check: what is written that comes near to it
    "evaluation_has_data": {"data.val_data": [], "trainer.eval_interval": 0, "trainer.eval_before_train": False},
    "recorded_samples_evaluate_nothing": {
        "trainer.rollouts_from": "runs/other",
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
    },
    "mini_batches_divide_the_batch": {"trainer.policy_mini_batch_size": 512},
    "critic_mini_batches_divide_the_batch": {"trainer.critic_mini_batch_size": 300},
    "micro_batches_divide_the_mini_batch": {"trainer.micro_train_batch_size_per_gpu": 5},
    "ranks_form_whole_groups": {
        **NO_KL,
        **gpus(6, "policy", "critic", "ref"),
        "trainer.policy.sequence_parallel_size": 3,
        "trainer.critic.sequence_parallel_size": 4,  # there is no critic
        "trainer.ref.sequence_parallel_size": 4,  # and no reference
        "trainer.policy.megatron_config.tensor_model_parallel_size": 4,  # and no Megatron
    },
    "mini_batches_deal_out_evenly": {
        **gpus(12, "policy"),
        "trainer.policy.sequence_parallel_size": 3,  # 1,280 samples go to 4 groups
        **gpus(3, "critic"),  # there is none
    },
    "the_reference_scores_equal_shares": {**gpus(6, "ref"), "trainer.ref.sequence_parallel_size": 3},
    "models_that_share_gpus_have_as_many": {**APART, **gpus(2, "ref"), **CRITIC, PLACEMENT + "critic_num_nodes": 3},
    "engines_that_share_gpus_take_all_of_them": {
        **VLLM,
        **gpus(8, "policy"),
        ENGINE + "tensor_parallel_size": 2,
        ENGINE + "pipeline_parallel_size": 2,
        ENGINE + "data_parallel_size": 2,
    },
    "engines_of_others_share_no_gpus": {**APART, ENGINE + "run_engines_locally": False},
    "engines_of_others_have_an_address": {ENGINE + "backend": "http", ENGINE + "external_proxy_url": "http://router"},
    "experts_take_every_gpu_of_an_engine": {
        **VLLM,
        ENGINE + "expert_parallel_size": 4,
        ENGINE + "tensor_parallel_size": 2,
        ENGINE + "data_parallel_size": 2,
    },
    "an_engine_of_child_processes_has_one_node": {
        **VLLM,
        **gpus(8, "policy"),
        PLACEMENT + "policy_num_nodes": 2,
        ENGINE + "distributed_executor_backend": "mp",
        ENGINE + "tensor_parallel_size": 4,
        ENGINE + "num_engines": 4,
    },
    "copies_of_the_weights_are_whole": {**gpus(8, "policy"), "trainer.policy.fsdp_config.fsdp_size": 4},
    "weights_stay_sharded_over_part_of_a_copy": {
        **gpus(8, "policy"),
        "trainer.policy.fsdp_config.fsdp_size": 4,
        "trainer.policy.fsdp_config.reshard_after_forward": 2,
    },
    "megatron_has_no_critic": CRITIC,
    "megatron_feeds_vllm": MEGATRON,
    "megatron_sends_weights_between_gpus": {**VLLM, ENGINE + "weight_sync_backend": "gloo"},
    "megatron_splits_sequences_by_context": {**MEGATRON, **NO_KL, "trainer.ref.sequence_parallel_size": 2},
    "context_parallel_samples_are_packed": {**MEGATRON, **split(1, 1, 2)},
    "several_evaluation_samples_differ": {
        "generator.eval_n_samples_per_prompt": 4,
        "generator.eval_sampling_params.temperature": 0.6,
    },
    "no_source_is_named_twice": {"data.train_data": ["a.parquet"], "data.val_data": ["a.parquet"]},
    "mini_batches_in_samples_are_those_in_prompts": {
        "trainer.policy_mini_batch_size": 256,
        "generator.n_samples_per_prompt": 4,
        "trainer.policy_mini_batch_size_in_samples": 1024,
    },
    "the_schedules_have_what_they_need": {"trainer.policy.optimizer_config.scheduler": "inverse_sqrt"},
    "gae_has_a_critic": {"trainer.algorithm.advantage_estimator": "gae", "trainer.critic.model.path": "critic"},
    "kl_is_counted_once": {"trainer.algorithm.use_kl_in_reward": True, "trainer.algorithm.use_kl_loss": False},
    "a_critic_is_asked": {**CRITIC, ALGORITHM + "advantage_estimator": "gae"},
    "advantages_are_normalized_once": {ALGORITHM + "advantage_norm.mean_level": "group"},
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
    "the_overlong_buffer_fits": {ALGORITHM + "reward_shaping.overlong.buffer_len": 256},
    "the_learner_scores_at_the_rollout_temperature": {
        "trainer.algorithm.temperature": 0.9,
        "generator.sampling_params.temperature": 0.9,
    },
    "training_samples_are_random": {"generator.eval_sampling_params.temperature": 0.0},
    "the_learner_can_score_what_was_sampled": {"generator.eval_sampling_params.repetition_penalty": 1.1},
    "a_single_turn_is_given_the_prompt": {"generator.max_input_length": 2000, "generator.max_turns": 2},
    "a_batch_at_once_is_in_flight_at_once": {"generator.max_trajectories_in_flight": 8},
    "several_turns_have_room": TURNS,
    "alarms_can_be_raised": {"trainer.alarms": [{"metric": "a"}, {"metric": "a", "name": "b"}, {"name": "kl_blow_up"}]},
    "a_resumed_run_has_a_path": {"trainer.resume_mode": "from_path", "trainer.resume_path": "ckpts/global_step_1"},
    "recovery_and_resuming_agree": {"trainer.recover_mode": "disabled", "trainer.resume_mode": "none"},
    "the_best_checkpoints_have_a_measure": {
        "trainer.ckpt_keep_best": 2,
        "trainer.max_ckpts_to_keep": 1,
        "trainer.ckpt_best_metric": "eval/all/avg_score",
    },
    "one_process_has_one_rank": {"trainer.placement.policy_num_nodes": 2},
    "repeatable_runs_are_promised_on_a_cpu": {"trainer.deterministic": True},
    "nccl_is_vllms": {**VLLM, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"},
    "samples_of_rounded_weights_are_corrected": {
        ENGINE + "rollout_dtype": "bfloat16",
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": 2.0,
    },
    "nccl_has_cuda": {ENGINE + "weight_sync_backend": "nccl"},  # in one process nothing travels
    "vllm_on_a_cpu_computes_eagerly": {**VLLM, "trainer.device": "cuda", ENGINE + "enforce_eager": False},
    "vllm_on_a_cpu_promises_no_repetition": {"trainer.deterministic": True},
    "parts_of_an_engine_on_a_cpu_are_child_processes": {
        **VLLM,
        ENGINE + "tensor_parallel_size": 2,
        ENGINE + "distributed_executor_backend": "mp",
    },
    "copies_inside_an_engine_are_asynchronous": {**VLLM, ENGINE + "data_parallel_size": 2},
    "statistics_come_from_the_asynchronous_engine": {**VLLM, ENGINE + "enable_ray_prometheus_stats": True},
    "every_sequence_of_a_step_has_a_token": {**VLLM, ENGINE + "max_num_batched_tokens": 1024},
}

FIRES |= ROLLOUT_CASES | LEARNER_CASES | ASYNC_CASES | PLAUSIBLE_CASES
SILENT |= SILENT_CASES | PLAUSIBLE_SILENT

NAMED: dict[str, Any] = {each.__name__: each for each in RL.checks}
CASES = [(name, values, path) for name, cases in FIRES.items() for values, path in cases]
ENTRIES = (*UNIMPLEMENTED, *UNIMPLEMENTED_VALUES)
REFUSING = [entry for entry in ENTRIES if entry.runs is not None and entry.severity == "error"]


def resolved(values: dict[str, Any]) -> SkyRLTrainConfig:
    """A tree that runs but for these values."""
    loaded = load([], RUNNABLE | values)
    return resolve_with_origins(loaded.config, loaded.origins)[0]


def other_values(entry: Unimplemented) -> Iterator[Any]:
    """Values of the entry's path that do not run."""
    if entry.path in PATHS - set(LEAVES):
        yield {"param_dtype": "fp32"}
        return
    value = OTHERS[entry.path]
    if value not in (entry.runs or ()):
        yield value
    if entry.path == "trainer.strategy":
        yield "megatron"
    if entry.path == ENGINE + "backend":
        yield "http"
    if entry.path == ENGINE + "weight_sync_backend":
        yield "delta"


def test_a_run_without_mistakes_has_no_problems() -> None:
    assert check(resolved({})) == []


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({SEARCH_URL: "http://***@retriever/"}, SEARCH_URL),
        ({"trainer.project_name": "***"}, "trainer.project_name"),
        ({"data.train_data": ["rows.jsonl", "https://***@host/rows.jsonl"]}, "data.train_data.1"),
        ({ENGINE + "engine_init_kwargs": {"a.b": {"token": "***"}}}, ENGINE + 'engine_init_kwargs."a.b".token'),
    ],
)
def test_what_was_hidden_is_given_again(values: dict[str, Any], path: str) -> None:
    problem = next(each for each in check(resolved(values)) if each.severity == "error" and "***" in each.message)
    assert problem.path == path


def test_what_was_hidden_is_given_again_in_runs_of_every_kind() -> None:
    with pytest.raises(ConfigError, match=r"train_datasets\.0  .*give it again  argument 2"):
        compose([], ["kind=sft", "train_datasets=['https://***@host/rows.jsonl']", "model.path=a/b"])


def test_what_only_looks_like_something_hidden_is_not() -> None:
    assert check(resolved({SEARCH_URL: "http://user@retriever/**"})) == check(resolved({SEARCH_URL: "http://user@a/"}))


def test_every_check_has_a_case() -> None:
    assert FIRES.keys() == NAMED.keys()


@pytest.mark.parametrize(("name", "values", "path"), CASES)
def test_a_check_fires(name: str, values: dict[str, Any], path: str) -> None:
    [problem] = NAMED[name](resolved(values))
    assert problem.path == path
    assert problem.message


@pytest.mark.parametrize("name", NAMED)
def test_a_check_is_silent_on_a_run_without_mistakes(name: str) -> None:
    assert list(NAMED[name](resolved({}))) == []


@pytest.mark.parametrize(("name", "values"), [*SILENT.items(), *EDGES])
def test_a_check_is_silent_near_by(name: str, values: dict[str, Any]) -> None:
    assert list(NAMED[name](resolved(values))) == []


@pytest.mark.parametrize(
    ("values", "which"),
    [
        ({"generator.chat_template.name_or_path": "qwen3_with_thinking"}, "generator.chat_template"),
        ({"generator.step_wise_trajectories": True}, "generator.step_wise_trajectories"),
    ],
)
def test_the_setting_that_makes_several_samples_of_a_trajectory_is_named(values: dict[str, Any], which: str) -> None:
    [problem] = NAMED["several_samples_have_no_time_in_common"](resolved(CRITIC | TURNS | values))
    assert f"with {which} a trajectory can be several" in problem.message


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("trainer.rope_theta", 1e4, "what runs: none"),
        ("trainer.policy.record_memory", True, "what runs: false"),
        ("trainer.policy.model_config_kwargs", {"key": 1}, "what runs: empty"),
        ("trainer.policy.sequence_parallel_size", 2, "what runs: 1"),
        ("trainer.strategy", "megatron", "what runs: fsdp or fsdp2 or deepspeed"),
    ],
)
def test_the_values_that_run_are_spelled_as_a_file_has_them(path: str, value: Any, hint: str) -> None:
    [entry] = [each for each in ENTRIES if each.path == path]
    [problem] = entry.check(evolve_at(SkyRLTrainConfig(), path, value))
    assert problem.hint == hint


@pytest.mark.parametrize(("name", "values", "path"), CASES)
def test_a_problem_is_about_a_path_that_exists_and_has_a_remedy_or_is_a_warning(
    name: str, values: dict[str, Any], path: str
) -> None:
    [problem] = NAMED[name](resolved(values))
    assert problem.path in PATHS or problem.path.startswith("generator.inference_engine.engine_init_kwargs.")
    assert problem.hint or problem.severity == "warning"


@pytest.mark.parametrize("name", NAMED)
def test_a_check_says_in_a_sentence_what_must_hold(name: str) -> None:
    assert NAMED[name].__doc__


def test_problems_have_the_place_of_what_they_are_about() -> None:
    given = [f"{path}={value}" for path, value in RUNNABLE.items()]
    with pytest.raises(ConfigError) as caught:
        compose([], [*given, "trainer.policy_mini_batch_size=300", "generator.max_input_length=3"])
    assert [(problem.path, problem.place) for problem in caught.value.problems] == [
        ("trainer.policy_mini_batch_size", "argument 4"),
        ("generator.max_input_length", "argument 5"),
    ]


def test_several_checks_fire_at_once() -> None:
    values = {"trainer.policy_mini_batch_size": 300, "data.train_data": [], "trainer.algorithm.temperature": 0.5}
    assert {problem.path for problem in check(resolved(values))} == values.keys()


# Numbers in the remedies


@pytest.mark.parametrize(
    ("batch", "mini", "hint"),
    [
        (1024, 300, "nearest divisors: 256 and 512"),
        (12, 5, "nearest divisors: 4 and 6"),
        (7, 3, "nearest divisors: 1 and 7"),
        (6, 100, "nearest divisors: 6"),
        (10**12, 3, "nearest divisors: 2 and 4"),
        (10**15, 3, ""),
    ],
)
def test_the_nearest_divisors_are_told(batch: int, mini: int, hint: str) -> None:
    run = resolved({"trainer.train_batch_size": batch, "trainer.policy_mini_batch_size": mini})
    [problem] = NAMED["mini_batches_divide_the_batch"](run)
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        (
            {"trainer.train_batch_size": 120, "trainer.policy_mini_batch_size": 30, **gpus(8, "policy")},
            "150 samples (30 prompts x 5) cannot be dealt out evenly to the policy's 8 data-parallel ranks",
            "nearest sizes that can: 24 and 40",
        ),
        (
            {"trainer.train_batch_size": 12, "trainer.policy_mini_batch_size": 6, **gpus(8, "policy")},
            "30 samples (6 prompts x 5) cannot be dealt out evenly to the policy's 8 data-parallel ranks",
            "no size that divides trainer.train_batch_size = 12 can; nearest numbers of ranks that it can be dealt to: "
            "6 and 10",
        ),
    ],
)
def test_the_nearest_mini_batches_divide_the_batch_too(values: dict[str, Any], message: str, hint: str) -> None:
    [problem] = NAMED["mini_batches_deal_out_evenly"](resolved(values))
    assert (problem.message, problem.hint) == (message, hint)


def test_the_nearest_micro_batches_suit_policy_and_critic() -> None:
    values = {"trainer.critic_mini_batch_size": 128, "trainer.micro_train_batch_size_per_gpu": 256}
    [problem] = NAMED["micro_batches_divide_the_mini_batch"](resolved(CRITIC | values))
    assert problem.message == "256 samples do not divide the critic's mini-batch of 640 (128 prompts x 5)"
    assert problem.hint == "nearest divisors: 160 and 320"


def test_the_nearest_batches_suit_mini_batches_and_reference() -> None:
    [problem] = NAMED["the_reference_scores_equal_shares"](resolved(gpus(3, "ref")))
    assert problem.message == (
        "5120 samples (1024 prompts x 5) cannot be dealt out evenly to the reference's 3 data-parallel ranks"
    )
    assert problem.hint == "nearest sizes that can, and that trainer.policy_mini_batch_size divides: 768 and 1536"


def test_a_mini_batch_that_does_not_divide_the_batch_is_told_once() -> None:
    values = {"trainer.policy_mini_batch_size": 300, **APART, **gpus(8, "policy"), **gpus(1, "ref")}
    found = [problem for each in BATCH_CHECKS for problem in each(resolved(values))]
    assert [problem.path for problem in found] == ["trainer.policy_mini_batch_size"]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("grop", "'grop' is unknown", "did you mean grpo?"),
        ("rlo", "'rlo' is unknown", "did you mean rloo?"),
        (
            "my_own",
            "'my_own' is unknown",
            "available: grpo, rloo, maxrl, reinforce++, reinforce++-baseline, gae, remax, opo, gpg, or module:name, "
            "file.py:name",
        ),
    ],
)
def test_an_unknown_estimator_is_told_what_there_is(name: str, message: str, hint: str) -> None:
    [problem] = NAMED["the_advantage_estimator_exists"](resolved({"trainer.algorithm.advantage_estimator": name}))
    assert (problem.message, problem.hint) == (message, hint)


# What is not implemented yet


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.path)
def test_what_is_not_implemented_yet_is_a_path_of_the_tree(entry: Unimplemented) -> None:
    assert entry.path in PATHS


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.path)
def test_a_value_that_asks_for_what_is_missing_is_refused(entry: Unimplemented) -> None:
    values = list(other_values(entry))
    assert values
    for value in values:
        run = evolve_if_possible(resolved({}), entry.path, value)
        [problem] = entry.check(run)
        assert problem.path == entry.path
        assert entry.what in problem.message
        assert problem.hint.startswith("what runs: ")
        assert "Watched" not in problem.message


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.path)
def test_a_value_that_runs_is_not_refused(entry: Unimplemented) -> None:
    for value in entry.runs or ():
        assert list(entry.check(evolve_if_possible(resolved({}), entry.path, value))) == []


@pytest.mark.parametrize(
    "values",
    [
        {"trainer.strategy": "deepspeed"},  # one rank in one process
        {"trainer.strategy": "deepspeed", **APART, **gpus(2, "policy", "ref")},
        {**VLLM},  # vLLM runs without CUDA, too
        {ENGINE + "backend": "vllm", PLACEMENT + "executor": "in_process"},
        {**APART, **gpus(2, "policy"), ENGINE + "num_engines": 3},
        {**RAY, **gpus(2, "policy", "ref"), ENGINE + "num_engines": 2},
        {**RAY, ENGINE + "weight_sync_backend": "gloo"},
        {**RAY, ENGINE + "weight_sync_backend": "disk"},
        {**VLLM, **RAY, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"},
        {**RAY, "trainer.device": "cuda"},  # gloo is derived
        {**RAY, PLACEMENT + "ray_address": "auto", PLACEMENT + "call_timeout_seconds": 60},
    ],
)
def test_a_run_on_several_processes_or_engines_is_not_refused(values: dict[str, Any]) -> None:
    loaded = load([], RUNNABLE | values)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    assert check(run, origins) == []


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        (
            {ENGINE + "weight_sync_backend": "delta"},
            ENGINE + "weight_sync_backend",
            "'delta' does not run in this version, which has not implemented it yet: sending the differences alone",
        ),
        (
            {"trainer.policy.sequence_parallel_size": 2, **gpus(2, "policy", "ref"), ENGINE + "num_engines": 2},
            "trainer.policy.sequence_parallel_size",
            "2 does not run in this version, which has not implemented it yet: sequence parallelism",
        ),
        (
            {ENGINE + "weight_sync_backend": "nccl"},
            ENGINE + "weight_sync_backend",
            "nccl sends memory of GPUs, and trainer.device is cpu",
        ),
        (
            gpus(2, "policy", "ref"),
            ENGINE + "num_engines",
            "1 engines of 1 GPUs (tensor 1 x pipeline 1 x data 1) take 1, and the policy has 2 (1 nodes of 2); with "
            "trainer.placement.colocate_all they share them",
        ),
    ],
)
def test_what_cannot_run_on_ray_is_refused_once(values: dict[str, Any], path: str, message: str) -> None:
    loaded = load([], RUNNABLE | RAY | values)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    [problem] = check(run, origins)
    assert (problem.path, problem.message, problem.severity) == (path, message, "error")
    assert problem.hint


def test_a_road_that_nothing_travels_on_is_told_and_not_refused() -> None:
    with_nccl = load([], RUNNABLE | {ENGINE + "weight_sync_backend": "nccl"})
    run, origins, _ = resolve_with_origins(with_nccl.config, with_nccl.origins)
    [problem] = check(run, origins)
    assert (problem.path, problem.severity) == (ENGINE + "weight_sync_backend", "warning")


def evolve_if_possible(run: SkyRLTrainConfig, path: str, value: Any) -> SkyRLTrainConfig:
    """The tree with this value, written as a file would write it."""
    if get_at(run, path) == value and type(get_at(run, path)) is type(value):
        return run
    if isinstance(value, dict) and path in PATHS - set(LEAVES):
        for name, item in value.items():
            run = evolve_at(run, f"{path}.{name}", item)
        return run
    return evolve_at(run, path, value if not isinstance(value, dict) else FrozenDict(value))


# Problems and warnings


def test_without_origins_written_means_other_than_the_default() -> None:
    run = resolved({"trainer.algorithm.sapo.tau_pos": 2.0})
    assert [(problem.path, problem.severity) for problem in check(run)] == [("trainer.algorithm.sapo", "warning")]


def test_what_was_derived_was_not_written() -> None:
    off = {"trainer.algorithm.use_kl_loss": False, "trainer.eval_interval": -1, "trainer.eval_before_train": False}
    assert check(resolved(off)) == []


@pytest.mark.parametrize(("name", "values", "path"), CASES)
def test_a_check_is_skipped_where_it_reads_a_broken_value(name: str, values: dict[str, Any], path: str) -> None:
    def about(broken: set[str]) -> list[Problem]:
        own = {repr(each) for each in NAMED[name](resolved(values))}
        return [each for each in check(resolved(values), {}, broken) if repr(each) in own]

    assert len(about(set())) == 1
    for broken in paths_read(NAMED[name], resolved(values)):
        assert about({broken}) == []


# Folders


OLD_RUN = '[trainer]\nrun_path = "runs/old"\nckpt_path = "runs/old/checkpoints"\n'


@pytest.mark.parametrize(
    ("text", "arguments", "refused"),
    [
        (OLD_RUN, ["trainer.run_path=runs/new"], ["trainer.ckpt_path"]),
        (OLD_RUN, ["trainer.run_path=runs/new", "trainer.ckpt_path=runs/new/c"], []),
        (OLD_RUN, ["trainer.run_path=runs/new", "trainer.ckpt_path=runs/old/c"], []),  # said for this run itself
        (OLD_RUN, ["~trainer.ckpt_path", "trainer.run_path=runs/new"], []),
        (OLD_RUN, [], []),
        ('[trainer]\nckpt_path = "/shared/ckpts"', ["trainer.run_path=runs/new"], []),
        ('[trainer]\nrun_name = "a"\nexport_path = "runs/a/x"', ["trainer.run_path=runs/b"], ["trainer.export_path"]),
        ('[trainer]\nrun_name = "a"\nexport_path = "runs/ab"', ["trainer.run_path=runs/b"], []),
    ],
)
def test_a_run_path_that_is_overridden_alone_writes_into_no_other_runs_folder(
    text: str, arguments: list[str], refused: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(text)
    loaded = load([tmp_path / "run.toml"], arguments)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    found = [problem for problem in check(run, origins) if "the folder of another run" in problem.message]
    assert [problem.path for problem in found] == refused
    assert all(problem.place.startswith(str(tmp_path)) and problem.severity == "error" for problem in found)


def test_a_base_file_and_one_on_top_of_it_are_two_layers(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(OLD_RUN)
    (tmp_path / "run.toml").write_text('extends = "base.toml"\n[trainer]\nrun_path = "runs/new"')
    with pytest.raises(ConfigError, match="runs/old/checkpoints is in the folder of another run"):
        compose([tmp_path / "run.toml"])


@pytest.mark.parametrize(("turns", "hint"), [(1, "leave it out in single-turn runs"), (3, "raise it to the longest")])
def test_the_cure_of_a_short_input_depends_on_the_turns(turns: int, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([], {**RUNNABLE, "generator.max_input_length": 100, "generator.max_turns": turns})
    assert hint in next(each.hint for each in caught.value.problems if each.path == "generator.max_input_length")
