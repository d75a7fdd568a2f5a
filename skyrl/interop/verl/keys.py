"""verl's settings that convert independently."""

from __future__ import annotations

from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    EVALUATION,
    SAMPLING,
    Entry,
    fixed,
    missing,
    non_empty,
    numeric,
    redundant,
    sources,
)

_POLICY = "trainer.policy."
_CRITIC = "trainer.critic."
_LOADERS = "affects how verl reads files; here rows are read and split into prompts once, before training"
_KERNELS = "affects speed, not results; learners choose their own kernels"
_REMOTE_CODE = "code from a model's repository is never run"


_MODEL: dict[str, Entry] = {
    "path": _POLICY + "model.path",
    "tokenizer_path": non_empty("trainer.tokenizer_path"),
    "lora_rank": _POLICY + "model.lora.rank",
    "lora_alpha": numeric(_POLICY + "model.lora.alpha"),
    "lora.rank": _POLICY + "model.lora.rank",
    "lora.alpha": numeric(_POLICY + "model.lora.alpha"),
    "lora.dropout": numeric(_POLICY + "model.lora.dropout"),
    "target_modules": _POLICY + "model.lora.target_modules",
    "exclude_modules": _POLICY + "model.lora.exclude_modules",
    "lora.type": fixed("lora", does="adapters are LoRA", otherwise="other kinds of adapters"),
    "lora.target_modules": missing(
        "Megatron's names of adapted layers", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    ),
    "lora.exclude_modules": missing("Megatron's names of adapted layers", []),
    "lora.merge": redundant("engines get merged weights or adapters, whichever they support"),
    "lora.dropout_position": fixed("pre", does="dropout comes before the adapter", otherwise="dropout behind adapters"),
    "lora.lora_A_init_method": fixed("xavier", does="the usual start", otherwise="other starts of adapters"),
    "lora.lora_B_init_method": fixed("zero", does="adapters begin at zero", otherwise="adapters that begin elsewhere"),
    "lora.a2a_experimental": redundant(_KERNELS),
    "lora.dtype": missing("adapters in another type than the model"),
    "lora.adapter_path": missing("training from an existing adapter; merge it first (docs/lora-and-export.md)", ""),
    "lora.freeze_*": redundant("only adapters are trained"),
    "lora_adapter_path": missing("training from an existing adapter; merge it first (docs/lora-and-export.md)", ""),
    "enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "enable_activation_offload": "trainer.offload_activations",
    "use_remove_padding": "trainer.use_sample_packing",
    "use_liger": "trainer.use_liger_kernel",
    **dict.fromkeys(("use_fused_kernels", "fused_kernel_options.*", "tiled_mlp.*"), redundant(_KERNELS)),
    "trust_remote_code": fixed(False, does=_REMOTE_CODE, otherwise="running code from a model's repository"),
    "custom_chat_template": missing("an inline chat template; set generator.chat_template to a file with it"),
    "external_lib": missing("importing a module for its side effects"),
    "hf_config_path": missing("a separate path for the model's configuration", ""),
    "use_shm": redundant("models are read directly from their path"),
    "torch_dtype": redundant("master weights are always float32"),
    "override_config": missing("a value for a whole table; set its fields instead", {}),
    "mtp.enable": fixed(False, None, does="off", otherwise="multi-token prediction"),
    "mtp.*": redundant("set by mtp.enable, which is not implemented"),
}

_ACTOR: dict[str, Entry] = {
    "optim.lr": numeric(_POLICY + "optimizer_config.lr"),
    "optim.weight_decay": numeric(_POLICY + "optimizer_config.weight_decay"),
    "optim.betas": _POLICY + "optimizer_config.adam_betas",
    "optim.min_lr_ratio": _POLICY + "optimizer_config.min_lr_ratio",
    "ppo_mini_batch_size": "trainer.policy_mini_batch_size",
    "ppo_epochs": "trainer.update_epochs_per_batch",
    "use_kl_loss": ALGORITHM + "use_kl_loss",
    "use_prefix_grouper": "trainer.share_group_prompts",
    "checkpoint.async_save": "trainer.async_ckpt_save",
    "loss_scale_factor": redundant("converted together with loss_agg_mode"),
    "freeze_vision_tower": fixed(False, does="there is no vision tower", otherwise="vision-language models"),
    "router_replay.*": redundant("set by router_replay.mode"),
    "shuffle": fixed(False, does="samples keep their order", otherwise="shuffling samples between epochs of a batch"),
    "calculate_sum_pi_squared": fixed(False, does="off", otherwise="the optimal token baseline"),
    "policy_loss.tau_*": redundant("not read: verl's loss sapo reads actor.tau_pos and tau_neg"),
    "policy_loss.dro_beta": redundant("set by loss_mode, whose loss dro is not implemented"),
    "use_rollout_log_probs": redundant("not read by verl 0.9; rollout_correction.bypass_mode decides"),
    "ppo_infer_*": redundant("the size of micro-batches without gradients does not affect results"),
}

_ROLLOUT: dict[str, Entry] = {
    "n": "generator.n_samples_per_prompt",
    "temperature": numeric(SAMPLING + "temperature"),
    "top_p": numeric(SAMPLING + "top_p"),
    "top_k": SAMPLING + "top_k",
    "do_sample": fixed(True, does="responses are sampled", otherwise="greedy decoding in training"),
    "ignore_eos": fixed(
        False, does="responses end at an end-of-sequence token", otherwise="ignoring end-of-sequence tokens"
    ),
    "prompt_length": redundant("prompts above data.max_prompt_length are skipped; verl pads others to this length"),
    "response_length": SAMPLING + "max_generate_length",
    "mode": redundant("every trajectory runs independently, as in verl's async mode"),
    "dtype": ENGINE + "model_dtype",
    "gpu_memory_utilization": numeric(ENGINE + "gpu_memory_utilization"),
    "enforce_eager": ENGINE + "enforce_eager",
    "expert_parallel_size": ENGINE + "expert_parallel_size",
    "max_num_batched_tokens": ENGINE + "max_num_batched_tokens",
    "max_num_seqs": ENGINE + "max_num_seqs",
    "max_model_len": ENGINE + "engine_init_kwargs.max_model_len",
    "enable_chunked_prefill": ENGINE + "enable_chunked_prefill",
    "enable_prefix_caching": ENGINE + "enable_prefix_caching",
    "free_cache_engine": redundant("engines sleep when models take turns on GPUs"),
    "layered_summon": redundant("weights are transferred in buckets"),
    "multi_stage_wake_up": redundant("engines wake up in the order that memory allows"),
    "load_format": redundant("the learner's weights replace those that engines load"),
    "calculate_log_probs": redundant("engines return log-probabilities: see generator.sampling_params.logprobs"),
    "enable_sleep_mode": redundant("engines sleep when models take turns on GPUs"),
    "skip_tokenizer_init": redundant("engines receive token IDs"),
    "update_weights_bucket_megabytes": redundant("weights are transferred in buckets"),
    "disable_log_stats": redundant("logging of verl's engines; here each engine has a log file under trainer.log_path"),
    "cudagraph_capture_sizes": missing("CUDA graph sizes; set them in engine_init_kwargs.compilation_config"),
    "quantization": missing("quantized engines"),
    "quantization_config_file": missing("quantized engines"),
    "mtp": redundant("only used with actor_rollout_ref.model.mtp.enable, which is not implemented"),
    "logprobs_mode": fixed(
        "processed_logprobs", does="log-probabilities are those sampled from", otherwise="raw log-probabilities"
    ),
    "scheduling_policy": fixed("fcfs", does="requests are served in order", otherwise="request priorities"),
    "skip_dump_dir": redundant("only used with rollout.skip_rollout, which is not implemented"),
    "over_sample_rate": fixed(0, 0.0, does="all samples are awaited", otherwise="oversampling requests"),
    "enable_rollout_routing_replay": "generator.inference_engine.enable_return_routed_experts",
    "skip.enable": missing("recorded rollouts; see trainer.rollouts_from", False),
    "skip.*": redundant("set by skip.enable, which is not implemented"),
    "skip_rollout": fixed(False, does="off", otherwise="recorded rollouts; see trainer.rollouts_from"),
    "val_kwargs.n": "generator.eval_n_samples_per_prompt",
    "val_kwargs.temperature": numeric(EVALUATION + "temperature"),
    "val_kwargs.top_p": numeric(EVALUATION + "top_p"),
    "val_kwargs.top_k": EVALUATION + "top_k",
    "val_kwargs.do_sample": redundant("not read since verl 0.7: val_kwargs.temperature decides, and 0 is greedy"),
    "agent.num_workers": redundant("trajectories need no worker processes"),
    "agent.default_agent_loop": fixed(
        "single_turn_agent", does="a single turn is the default", otherwise="verl's agent loops; see docs/agents.md"
    ),
    "agent.*": missing("verl's agent loops; see docs/agents.md"),
    "checkpoint_engine.custom_backend_module": missing("a transfer of weights of your own"),
    "checkpoint_engine.*": redundant("set by generator.inference_engine.weight_sync_backend"),
    "seed": redundant("the seeds of engines follow from trainer.seed"),
    "full_determinism": missing("answers that do not depend on what an engine samples beside them", False),
    "repetition_penalty": numeric(SAMPLING + "repetition_penalty"),
    "moe_load_balance_metrics_interval": redundant("measures only: learners log the loads of experts"),
    "router_config_path": missing("routers of verl's; generator.inference_engine routes by prefix and load"),
    "disaggregation.enabled": missing("engines for prompts apart from engines for answers", False),
    "disaggregation.*": redundant("set by disaggregation.enabled, which is not implemented"),
    "qat": missing("quantization-aware training"),
    "qat.*": redundant("set by the actor's qat, which is not implemented"),
    "standalone_gpu_memory_utilization": numeric(ENGINE + "gpu_memory_utilization"),
}

_OF_CRITIC: dict[str, Entry] = {
    "optim.lr": numeric(_CRITIC + "optimizer_config.lr"),
    "optim.weight_decay": numeric(_CRITIC + "optimizer_config.weight_decay"),
    "optim.betas": _CRITIC + "optimizer_config.adam_betas",
    "optim.min_lr_ratio": _CRITIC + "optimizer_config.min_lr_ratio",
    "model.path": _CRITIC + "model.path",
    "model.lora_rank": _CRITIC + "model.lora.rank",
    "model.lora_alpha": numeric(_CRITIC + "model.lora.alpha"),
    "model.trust_remote_code": fixed(False, does=_REMOTE_CODE, otherwise="running code from a model's repository"),
    **{f"model.{name}": redundant("one setting for all models, set by the policy's") for name in (
        "tokenizer_path", "enable_gradient_checkpointing", "enable_activation_offload", "use_remove_padding", "use_shm",
        "external_lib", "tiled_mlp.*", "override_config", "hf_config_path",
        "custom_chat_template", "use_liger", "use_fused_kernels", "fused_kernel_options.*", "mtp.*",
    )},
    "model.target_modules": _CRITIC + "model.lora.target_modules",
    "model.exclude_modules": _CRITIC + "model.lora.exclude_modules",
    "model.lora_adapter_path": missing("training from an existing adapter; merge it first", ""),
    "model.lora.rank": missing("adapters of a critic on Megatron", 0),
    "model.lora.*": redundant("set by lora.rank"),
    "loss_scale_factor": redundant("converted together with loss_agg_mode"),
    "nccl_timeout": redundant("timeouts are set in trainer.placement"),
    "ppo_mini_batch_size": "trainer.critic_mini_batch_size",
    "cliprange_value": numeric(ALGORITHM + "value_clip"),
    "shuffle": fixed(False, does="samples keep their order", otherwise="shuffling samples between epochs of a batch"),
    "rollout_n": redundant("set by generator.n_samples_per_prompt"),
    "data_loader_seed": redundant("samples keep their order"),
}  # fmt: skip

_DATA: dict[str, Entry] = {
    "train_files": sources("data.train_data"),
    "val_files": sources("data.val_data"),
    "prompt_key": "data.prompt_column",
    "train_batch_size": "trainer.train_batch_size",
    "val_batch_size": "trainer.eval_batch_size",
    "max_prompt_length": "trainer.max_prompt_length",
    "max_response_length": SAMPLING + "max_generate_length",
    "tokenizer": non_empty("trainer.tokenizer_path"),
    "filter_overlong_prompts": redundant("longer prompts are skipped and counted"),
    "shuffle": "data.shuffle",
    "validation_shuffle": redundant("evaluation uses every prompt, so order does not matter"),
    "seed": fixed(None, does="derived from trainer.seed", otherwise="a separate seed for the order of prompts"),
    "train_max_samples": fixed(
        -1, does="all rows are used", otherwise="a subset of rows; write it as NAME:train[:100]"
    ),
    "val_max_samples": fixed(-1, does="all rows are used", otherwise="a subset of rows; write it as NAME:test[:100]"),
    "reward_fn_key": fixed(
        "data_source", does="data_source is the default", otherwise="columns other than data_source"
    ),
    "image_key": fixed("images", None, does="rows have no images", otherwise="vision-language rollouts"),
    "video_key": fixed("videos", None, does="rows have no videos", otherwise="vision-language rollouts"),
    "audio_key": fixed("audios", None, does="rows have no sound", otherwise="rows with sound"),
    "mm_processor_kwargs*": missing("vision-language rollouts", {}),
    "function_tool_path": missing("converting verl's tools, which are environments here (docs/tools.md)"),
    "trust_remote_code": fixed(False, does=_REMOTE_CODE, otherwise="running code from a model's repository"),
    "gen_batch_size": redundant("prompts are drawn as needed"),
    "apply_chat_template_kwargs": missing("a value for a whole table; set its fields instead", {}),
    "custom_cls.*": missing("custom dataset classes; data.train_data accepts files, folders and Hub datasets", ""),
    "sampler.*": missing("custom samplers", ""),
    "datagen.*": missing("prompts generated during training", ""),
    "tool_config_path": missing("converting verl's tools, which are environments here (docs/tools.md)"),
    **{name: redundant(_LOADERS) for name in (
        "use_shm", "return_raw_input_ids", "return_raw_chat", "return_full_prompt", "return_multi_modal_inputs",
        "dataloader_num_workers", "filter_overlong_prompts_workers", "image_patch_size",
    )},
}  # fmt: skip

_TRAINER: dict[str, Entry] = {
    "total_epochs": "trainer.epochs",
    "total_training_steps": "trainer.max_training_steps",
    "project_name": "trainer.project_name",
    "experiment_name": "trainer.run_name",
    "save_freq": "trainer.ckpt_interval",
    "test_freq": "trainer.eval_interval",
    "val_before_train": "trainer.eval_before_train",
    "val_only": fixed(False, does="off", otherwise="evaluation-only runs; use `skyrl eval`"),
    "default_local_dir": "trainer.ckpt_path",
    "max_actor_ckpt_to_keep": "trainer.max_ckpts_to_keep",
    "max_critic_ckpt_to_keep": redundant("a checkpoint contains policy and critic"),
    "critic_warmup": fixed(
        0, does="the policy is trained from the first step", otherwise="training only the critic at first"
    ),
    "device": fixed("cuda", does="models run on GPUs", otherwise="devices other than CUDA"),
    "balance_batch": redundant("long and short samples are balanced across ranks"),
    "log_val_generations": redundant("evaluation samples are saved in the run folder: see `skyrl view`"),
    "rollout_data_dir": redundant("samples are saved in the run folder"),
    "validation_data_dir": redundant("evaluation samples are saved in the run folder"),
    "del_local_ckpt_after_load": redundant("trainer.max_ckpts_to_keep decides which checkpoints are kept"),
    "default_hdfs_dir": missing("HDFS; trainer.ckpt_path may be an object store (docs/checkpoints.md)"),
    "esi_redundant_time": redundant("trainer.faults.stop_before stops a run before its machine shuts down"),
    "checkpoint_callback_class": missing("code of your own that runs when a checkpoint is written"),
    "v1.sync": redundant("an empty table"),
    "v1.sampler.custom_sampler.path": missing("custom samplers"),
    "v1.sampler.custom_sampler.name": redundant("set by custom_sampler.path"),
    "v1.sampler.sampler_kwargs*": redundant("set by custom_sampler.path"),
    "v1.sampler.sync_refill_failed_groups": redundant(
        "samples that fail are drawn again; trainer.faults says what becomes of the rest"
    ),
    "v1.separate_async.hybrid_rollout.*": redundant("set by enable_switch, which is not implemented"),
    "use_legacy_worker_impl": redundant("there is only one worker implementation"),
    "ray_wait_register_center_timeout": redundant("timeouts are set in trainer.placement"),
}

_FSDP: dict[str, Entry] = {
    "param_offload": redundant("weights are offloaded to the host when models take turns on GPUs"),
    "model_dtype": fixed(
        "fp32", "float32", does="master weights are always float32", otherwise="other weight dtypes"
    ),
    "mixed_precision": missing("a value for a whole table; set its fields instead"),
    "full_determinism": "trainer.deterministic",
    "seed": redundant("seeds follow from trainer.seed"),
    "turbo_config.*": redundant("only read by the strategy fsdp_turbo, which does not exist here"),
    **dict.fromkeys(
        ("wrap_policy", "wrap_policy.*", "forward_prefetch", "use_orig_params", "forward_only", "cpu_offload",
         "use_no_sync_for_gradient_accumulation"),
        redundant("FSDP2 wraps layers one by one, and transfers what it needs"),
    ),
    **dict.fromkeys(("use_torch_compile", "pad_to_length*", "entropy_*"), redundant(_KERNELS)),
}  # fmt: skip
"""Settings of FSDP, which stand in several tables."""

_OPTIM: dict[str, Entry] = {
    "optimizer_impl": fixed(
        "torch.optim", does="torch's optimizers are used", otherwise="optimizers from other packages"
    ),
    "num_cycles": fixed(0.5, does="a cosine schedule decays once", otherwise="a cosine schedule with several cycles"),
    "total_training_steps": redundant("derived from the data and the number of epochs"),
    "override_optimizer_config": missing("a value for a whole table; set its fields instead", {}),
    "lr_wsd_*": missing("Megatron's schedules"),
    "weight_decay_incr_style": fixed(
        "constant", does="weight decay is constant", otherwise="weight decay that grows"
    ),
    "use_checkpoint_opt_param_scheduler": fixed(
        False, does="the schedule is that of the settings", otherwise="a schedule taken from a checkpoint"
    ),
    "use_precision_aware_optimizer": missing("optimizer states below float32", False),
    **dict.fromkeys(
        ("muon_*", "use_layer_wise_*", "main_grads_dtype", "exp_avg_*"),
        redundant("set by another setting of the optimizer, which is not implemented"),
    ),
    **dict.fromkeys((
        "lr_decay_ratio", "lr_min", "lr_start", "decay_type", "eps", "min_lr_factor", "name", "init_lr_ratio",
        "wd_incr_style", "master_weights", "store_param_remainders", "master_weight_dtype",
    ), redundant("only read by the strategies veomni, torchtitan and automodel")),
}  # fmt: skip
"""Settings of optimizers, which stand in several tables."""

KEYS: dict[str, Entry] = {
    "model_engine": redundant("set by the learners' strategy"),
    "*._target_": redundant("names a verl class"),
    **{f"actor_rollout_ref.model.{name}": entry for name, entry in _MODEL.items()},
    **{f"actor_rollout_ref.actor.{name}": entry for name, entry in _ACTOR.items()},
    **{f"actor_rollout_ref.rollout.{name}": entry for name, entry in _ROLLOUT.items()},
    **{f"critic.{name}": entry for name, entry in _OF_CRITIC.items()},
    **{f"data.{name}": entry for name, entry in _DATA.items()},
    **{f"trainer.{name}": entry for name, entry in _TRAINER.items()},
    "actor_rollout_ref.hybrid_engine": fixed(
        True, does="engines share the learners' GPUs", otherwise="engines on separate GPUs"
    ),
    "actor_rollout_ref.nccl_timeout": redundant("timeouts are set in trainer.placement"),
    "actor_rollout_ref.rollout.trace.backend": missing("traces of samples in a tracker; `skyrl view` shows samples"),
    "actor_rollout_ref.rollout.trace.*": redundant("set by trace.backend, which is not implemented"),
    "actor_rollout_ref.rollout.prometheus.enable": missing("metrics of engines for Prometheus", False),
    "actor_rollout_ref.rollout.prometheus.*": redundant("set by prometheus.enable, which is not implemented"),
    "algorithm.gamma": numeric(ALGORITHM + "gamma"),
    "algorithm.lam": numeric(ALGORITHM + "lambd"),
    "algorithm.norm_adv_by_std_in_grpo": ALGORITHM + "grpo_norm_by_std",
    "algorithm.use_kl_in_reward": ALGORITHM + "use_kl_in_reward",
    "algorithm.use_pf_ppo": fixed(False, does="off", otherwise="PF-PPO, which resamples by reward"),
    "algorithm.pf_ppo.*": redundant("only used with algorithm.use_pf_ppo, which is not implemented"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": fixed(
        False, does="weights are not normalized", otherwise="batch-normalized importance weights"
    ),
    **{f"*.optim.{name}": entry for name, entry in _OPTIM.items()},
    **{f"{table}.{name}": entry for table in ("*.fsdp_config", "critic.fsdp") for name, entry in _FSDP.items()},
    "*.qat.enable": missing("quantization-aware training", False),
    "*.qat.*": redundant("set by qat.enable, which is not implemented"),
    "*.checkpoint.strict": fixed(
        True, does="checkpoints are loaded in full", otherwise="checkpoints that lack weights"
    ),
    "*.mbridge_config*": missing("options of mbridge", {}),
    "*.load_weight": fixed(
        True, does="models begin with their weights", otherwise="models that begin with random ones"
    ),
    **{f"*.{name}": redundant(_KERNELS) for name in (
        "entropy_from_logits_chunk_size", "pad_to_length*", "use_torch_compile", "use_fused_kernels",
        "entropy_from_logits_with_chunking", "entropy_checkpointing", "sum_pi_squared_checkpointing",
    )},
    "*.use_remove_padding": redundant("one setting for all models: trainer.use_sample_packing"),
    "*.calculate_entropy": redundant("entropy is always logged"),
    "*.data_loader_seed": redundant("samples keep their order"),
    "*.rollout_n": redundant("set by generator.n_samples_per_prompt"),
    "critic.checkpoint.async_save": redundant("one setting for all models: trainer.async_ckpt_save"),
    "*.load_contents": redundant("checkpoints are always loaded in full"),
    "*.router_replay.*": redundant("set by the policy's settings"),
    "reward_manager.name": redundant("set by reward_model.reward_manager"),
    "reward_manager.module.*": redundant("set by reward_manager.source, which is not implemented"),
    "reward.reward_manager.module.*": redundant("set by reward_manager.source, which is not implemented"),
    "skip.*.enable": missing("recorded rollouts; see trainer.rollouts_from", False),
    "skip.*": redundant("set by enable, which is not implemented"),
    "transfer_queue.*": redundant("how verl moves samples between its processes"),
    "hydra.*": redundant("where Hydra finds verl's files"),
    "*@*": missing("another choice among verl's files of defaults"),
    "trainer.worker_env*": missing("environment variables of single workers; a cluster file has those of a run"),
    "algorithm.gdpo_reward_keys": missing("normalising several rewards apart (GDPO)"),
    "async_training.dynamic_schedule_*": redundant("set by use_dynamic_resource_scheduling, which is not implemented"),
    "*.runtime_env.py_executable": redundant("workers run in the Python environment of the command"),
    "*.runtime_env.env_vars*": missing(
        "variables of workers; a cluster file has those of a run (docs/launching.md)", {}
    ),
    "ray_kwargs.timeline_json_file": missing("Ray's timeline"),
    "ray_kwargs.*": redundant("the connection to Ray is set in trainer.placement"),
    "ray_init.*": redundant("the connection to Ray is set in trainer.placement"),
}  # fmt: skip
