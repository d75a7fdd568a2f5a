"""The names of all AReaL settings of autumn 2025 and May 2026, to distinguish unknown settings from unconverted ones.

`areal/keys.py` defines the conversion of each; a name listed here without an entry there is known but not converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

_CLASSES: dict[str, str] = {
    "NormConfig": "mean_level mean_leave1out std_level std_unbiased eps group_size",
    "MicroBatchSpec": "n_mbs granularity max_tokens_per_mb n_mbs_divisor packing_algorithm",
    "GenerationHyperparameters": (
        "n_samples max_new_tokens min_new_tokens max_tokens greedy top_p top_k temperature stop_token_ids "
        "ignore_eos skip_special_tokens stop frequency_penalty lora_name use_beam_search "
        "_OPENAI_UNSUPPORTED_ARGS"
    ),
    "OptimizerConfig": (
        "type lr weight_decay beta1 beta2 eps min_lr_ratio lr_scheduler_type warmup_steps_proportion "
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis gradient_clipping offload"
    ),
    "FSDPWrapPolicy": "transformer_layer_cls_to_wrap",
    "FSDPEngineConfig": (
        "wrap_policy:FSDPWrapPolicy offload_params memory_efficient_load per_layer_optim_step "
        "optim_step_prefetch_layers shard_vision_across_sp"
    ),
    "ArchonFP8Config": "mode exclude_modules include_experts use_triton",
    "ArchonEngineConfig": (
        "attn_type offload_params enable_compile ac_mode selective_ac_option ac_memory_budget "
        "ac_preserve_rng_state ac_debug pp_schedule pp_layers_per_stage pp_first_stage_less_layers "
        "pp_last_stage_less_layers reshard_after_forward_policy fp8_config:ArchonFP8Config "
        "use_deterministic_algorithms moe_router_dtype"
    ),
    "DistributedDataParallelConfig": (
        "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather "
        "use_distributed_optimizer check_for_nan_in_grad bucket_size average_in_collective fp8_param_gather"
    ),
    "FP8EngineConfig": (
        "mode recipe param margin amax_history_len amax_compute_algo wgrad dot_product_attention "
        "multi_head_attention tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 "
        "num_layers_at_end_in_bf16 direct_convert"
    ),
    "MegatronEngineConfig": (
        "wrap_with_ddp use_torch_fsdp2 use_custom_fsdp ddp:DistributedDataParallelConfig "
        "virtual_pipeline_parallel_size overlap_param_gather_with_optimizer_step "
        "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype "
        "async_save use_checkpoint_opt_param_scheduler use_deterministic_algorithms recompute_granularity "
        "recompute_method recompute_num_layers distribute_saved_activations recompute_modules "
        "moe_router_dtype moe_shared_expert_overlap moe_enable_deepep moe_token_dispatcher_type "
        "moe_permute_fusion fp8_config:FP8EngineConfig bridge_type use_mbridge_save"
    ),
    "SchedulingStrategy": "type target fork",
    "SchedulingSpec": (
        "cpu gpu mem port_count image task_type env_vars cmd srun_additional_args additional_bash_cmds "
        "container_type mount nodelist exclude ray_placement_strategy"
    ),
    "TrainEngineConfig": (
        "experiment_name trial_name path attn_impl use_kernels init_from_scratch is_critic temperature "
        "mb_spec:MicroBatchSpec pad_to_maximum disable_dropout gradient_checkpointing dtype grad_reduce_dtype "
        "optimizer:OptimizerConfig weight_update_mode fsdp:FSDPEngineConfig archon:ArchonEngineConfig "
        "megatron:MegatronEngineConfig offload use_lora lora_rank lora_alpha target_modules peft_type "
        "enable_tree_training scheduling_spec:SchedulingSpec backend _version admin_api_key log_level "
        "request_timeout setup_timeout scheduling_strategy:SchedulingStrategy "
        "ds_auto_tp:DeepSpeedAutoTPEngineConfig"
    ),
    "RejectionSamplingConfig": "level action metric agg upper lower",
    "PPOActorConfig": (
        "*TrainEngineConfig ppo_n_minibatches eps_clip eps_clip_higher c_clip m2_threshold "
        "reward_norm:NormConfig reward_scaling reward_bias reward_clip overlong_reward_penalty "
        "overlong_tokens overlong_penalty_factor mask_no_eos_with_zero discount gae_lambda "
        "adv_norm:NormConfig kl_ctl kl_estimator use_sapo_loss sapo_tau_pos sapo_tau_neg recompute_logprob "
        "use_decoupled_loss rejection_sampling:RejectionSamplingConfig importance_sampling_level "
        "prox_logp_method log_agent_stats log_agent_stats_keys max_new_tokens group_size behav_imp_weight_cap "
        "behave_imp_weight_cap behave_imp_weight_mode "
        "dynamic_sampling"
    ),
    "PPOCriticConfig": "*TrainEngineConfig ppo_n_minibatches eps_clip mask_no_eos_with_zero",
    "vLLMConfig": (
        "model seed skip_tokenizer_init enforce_eager dtype distributed_executor_backend max_num_seqs "
        "block_size cpu_offload_gb disable_sliding_window max_model_len no_enable_chunked_prefill "
        "no_enable_prefix_caching gpu_memory_utilization worker_extension_cls enable_sleep_mode "
        "uvicorn_log_level enable_lora max_lora_rank max_loras lora_modules"
    ),
    "SGLangConfig": (
        "model_path random_seed skip_tokenizer_init disable_cuda_graph disable_radix_cache "
        "disable_cuda_graph_padding enable_nccl_nvls disable_outlines_disk_cache disable_custom_all_reduce "
        "disable_overlap_schedule enable_mixed_chunk enable_dp_attention enable_ep_moe enable_torch_compile "
        "torch_compile_max_bs cuda_graph_max_bs cuda_graph_bs torchao_config enable_nan_detection "
        "enable_p2p_check triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
        "num_continuous_decode_steps enable_memory_saver allow_auto_truncate attention_backend "
        "enable_multimodal sampling_backend context_length mem_fraction_static max_running_requests "
        "chunked_prefill_size max_prefill_tokens schedule_policy schedule_conservativeness cpu_offload_gb "
        "dtype kv_cache_dtype dp_size ep_size enable_lora max_lora_rank max_loaded_loras lora_paths "
        "lora_backend log_level log_level_http log_requests log_requests_level show_time_cost enable_metrics "
        "decode_log_interval enable_multithread_load enable_return_routed_experts"
    ),
    "AgentConfig": (
        "agent_cls_path admin_api_key scheduling_spec:SchedulingSpec mode tool_call_parser reasoning_parser "
        "chat_template_type engine_max_tokens turn_discount export_style subproc_max_workers "
        "session_timeout_seconds set_reward_finish_timeout"
    ),
    "InferenceEngineConfig": (
        "experiment_name trial_name fileroot max_concurrent_rollouts queue_size consumer_batch_size "
        "max_head_offpolicyness enable_rollout_tracing check_trajectory_format tokenizer_path dump_to_file "
        "setup_timeout request_timeout request_retries pause_grace_period scheduling_spec:SchedulingSpec "
        "backend scheduling_strategy:SchedulingStrategy use_lora agent:AgentConfig return_routed_experts "
        "_version model routing_strategy poll_interval admin_api_key api_url provider_api_key schedule_policy"
    ),
    "_Timer": "experiment_name trial_name fileroot freq_epochs freq_steps freq_secs",
    "EvaluatorConfig": "*_Timer eval_before_train",
    "SaverConfig": "*_Timer mode",
    "RecoverConfig": "*_Timer mode retries no_save_optim no_load_optim",
    "WandBConfig": "mode wandb_base_url wandb_api_key entity project name job_type group notes tags config id_suffix",
    "SwanlabConfig": "project name config logdir mode api_key",
    "TensorBoardConfig": "path",
    "TrackioConfig": "mode project name space_id",
    "StatsLoggerConfig": (
        "experiment_name trial_name fileroot wandb:WandBConfig swanlab:SwanlabConfig "
        "tensorboard:TensorBoardConfig trackio:TrackioConfig"
    ),
    "SessionTracerConfig": "enabled flush_threshold",
    "MemoryProfilerConfig": "profile_steps max_entries",
    "PerfTracerConfig": (
        "experiment_name trial_name fileroot enabled save_interval profile_steps session_tracer:SessionTracerConfig"
    ),
    "NameResolveConfig": "type nfs_record_root etcd3_addr ray_actor_name",
    "ClusterSpecConfig": "name_resolve:NameResolveConfig cluster_name fileroot n_nodes n_gpus_per_node",
    "SchedulerConfig": (
        "type endpoint deploy_mode functioncall_service_domain reward_functioncall_config reward_model_path "
        "reward_model_service_url"
    ),
    "_DatasetConfig": (
        "split path type batch_size shuffle pin_memory num_workers num_dataset_workers drop_last max_length "
        "dataset_kwargs scheduling_spec:SchedulingSpec setup_timeout"
    ),
    "TrainDatasetConfig": "*_DatasetConfig",
    "ValidDatasetConfig": "*_DatasetConfig",
    "BaseExperimentConfig": (
        "experiment_name trial_name cluster:ClusterSpecConfig allocation_mode seed enable_offload "
        "total_train_epochs total_train_steps total_train_n_seqs tokenizer_path "
        "train_dataset:TrainDatasetConfig valid_dataset:ValidDatasetConfig saver:SaverConfig "
        "evaluator:EvaluatorConfig stats_logger:StatsLoggerConfig perf_tracer:PerfTracerConfig "
        "memory_profiler:MemoryProfilerConfig recover:RecoverConfig sglang:SGLangConfig vllm:vLLMConfig "
        "scheduler:SchedulerConfig launcher:LauncherConfig"
    ),
    "SFTConfig": "*BaseExperimentConfig actor:TrainEngineConfig model:TrainEngineConfig",
    "RWConfig": "*BaseExperimentConfig actor:TrainEngineConfig model:TrainEngineConfig",
    "DPOEngineConfig": "*TrainEngineConfig beta loss_type",
    "DPOConfig": "*BaseExperimentConfig actor:DPOEngineConfig ref:DPOEngineConfig",
    "TeacherConfig": "*PPOActorConfig rl_loss_weight distill_loss_weight",
    "PPOConfig": (
        "*BaseExperimentConfig gconfig:GenerationHyperparameters eval_gconfig:GenerationHyperparameters "
        "rollout:InferenceEngineConfig actor:PPOActorConfig ref:PPOActorConfig critic:PPOCriticConfig "
        "teacher:TeacherConfig dynamic_bs"
    ),
    "GRPOConfig": "*PPOConfig launcher:LauncherConfig async_training",
    "LauncherConfig": (
        "inference_server_cpus_per_gpu inference_server_mem_per_gpu trainer_cpus_per_gpu trainer_mem_per_gpu "
        "inference_server_env_vars trainer_env_vars slurm:SlurmLauncherConfig"
    ),
    "DeepSpeedAutoTPEngineConfig": "autotp_size",
    "SlurmLauncherConfig": "srun_additional_args container_type mount trainer_image inference_server_image",
}
"""Class -> its fields: `name`, `name:Class` for a table, `*Class` for the fields of another class."""

_EXPERIMENTS = ("GRPOConfig", "SFTConfig", "RWConfig", "DPOConfig")
_FREE = ("env_vars", "dataset_kwargs", "config", "reward_functioncall_config", "lora_paths", "lora_modules")
"""Tables whose keys are chosen by the user."""


def is_known(key: str) -> bool:
    """Whether AReaL has a setting or a table of this dotted name, in any kind of experiment."""
    names = re.sub(r"\[\d+\]", "", key).split(".")
    return any(_has(experiment, names) for experiment in _EXPERIMENTS)


@cache
def known_names() -> tuple[str, ...]:
    """Every dotted name of a setting, except those inside tables with user-chosen keys."""
    return tuple(dict.fromkeys(name for experiment in _EXPERIMENTS for name in _names(experiment)))


def _has(cls: str, names: list[str]) -> bool:
    fields = _fields(cls)
    if names[0] not in fields:
        return False
    inner = fields[names[0]]
    return len(names) == 1 or names[0] in _FREE or (bool(inner) and _has(inner, names[1:]))


def _names(cls: str, prefix: str = "") -> Iterator[str]:
    for name, inner in _fields(cls).items():
        if inner:
            yield from _names(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


@cache
def _fields(cls: str) -> Mapping[str, str]:
    """Field name -> its class if it is a table, else empty text."""
    fields: dict[str, str] = {}
    for word in _CLASSES.get(cls, "").split():
        name, _, inner = word.partition(":")
        fields |= _fields(name[1:]) if name.startswith("*") else {name: inner}
    return fields
