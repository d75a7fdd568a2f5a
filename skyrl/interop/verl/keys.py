"""verl's settings that convert independently."""

from __future__ import annotations

from skyrl.interop.conversions import (
    ALGORITHM,
    ENGINE,
    SAMPLING,
    Becomes,
    Entry,
    batch_of_one_source,
    goes_to,
    later,
    not_there,
    number,
    only,
    unless_empty,
)

_EVAL = "generator.eval_sampling_params."
_POLICY = "trainer.policy."
_CRITIC = "trainer.critic."
_LOADERS = "affects how verl reads files; here rows are read and split into prompts once, before training"
_KERNELS = "affects speed, not results; learners choose their own kernels"
_SHARED = "weights are offloaded to the host when models take turns on GPUs"
_TRACES = "logging of verl's engines; here each engine has a log file under trainer.log_path"
_REMOTE_CODE = "code from a model's repository is never run"


def _router_replay(value: object) -> Becomes:
    """Convert routing replay: R3 replays the experts of the rollout, R2 the learner's in the old log-probabilities."""
    if value == "R3":
        returned = "generator.inference_engine.enable_return_routed_experts"
        return Becomes(writes={_POLICY + "moe_enable_routing_replay": True, returned: True})
    if value in ("disabled", None):
        return Becomes(needless="off")
    return Becomes(not_yet="replaying the experts that the learner used for old log-probabilities")


_MODEL: dict[str, Entry] = {
    "path": goes_to(_POLICY + "model.path"),
    "tokenizer_path": unless_empty("trainer.tokenizer_path"),
    "lora_rank": goes_to(_POLICY + "model.lora.rank"),
    "lora_alpha": goes_to(_POLICY + "model.lora.alpha", convert=number),
    "lora.rank": goes_to(_POLICY + "model.lora.rank"),
    "lora.alpha": goes_to(_POLICY + "model.lora.alpha", convert=number),
    "lora.dropout": goes_to(_POLICY + "model.lora.dropout", convert=number),
    "target_modules": goes_to(_POLICY + "model.lora.target_modules"),
    "exclude_modules": goes_to(_POLICY + "model.lora.exclude_modules"),
    "lora.*": later("other settings of Megatron adapters"),
    "lora_adapter_path": later("training from an existing adapter; merge it first (docs/lora-and-export.md)", ""),
    "enable_gradient_checkpointing": goes_to("trainer.gradient_checkpointing"),
    "enable_activation_offload": goes_to("trainer.offload_activations"),
    "use_remove_padding": goes_to("trainer.use_sample_packing"),
    "use_liger": goes_to("trainer.use_liger_kernel"),
    "use_fused_kernels": not_there(_KERNELS),
    "fused_kernel_options.*": not_there(_KERNELS),
    "tiled_mlp.*": not_there(_KERNELS),
    "trust_remote_code": only(False, does=_REMOTE_CODE, otherwise="running code from a model's repository"),
    "custom_chat_template": later("an inline chat template; set generator.chat_template to a file with it"),
    "external_lib": later("importing a module for its side effects"),
    "hf_config_path": later("a separate path for the model's configuration", ""),
    "use_shm": not_there("models are read directly from their path"),
    "torch_dtype": not_there("master weights are always float32"),
    "override_config": later("a value for a whole table; set its fields instead", {}),
    "mtp.enable": only(False, None, does="off", otherwise="multi-token prediction"),
    "mtp.*": not_there("only used with mtp.enable, which is not implemented"),
}

_ACTOR: dict[str, Entry] = {
    "optim.lr": goes_to(_POLICY + "optimizer_config.lr", convert=number),
    "optim.weight_decay": goes_to(_POLICY + "optimizer_config.weight_decay", convert=number),
    "optim.betas": goes_to(_POLICY + "optimizer_config.adam_betas"),
    "optim.min_lr_ratio": goes_to(_POLICY + "optimizer_config.min_lr_ratio"),
    "ppo_mini_batch_size": goes_to("trainer.policy_mini_batch_size"),
    "ppo_epochs": goes_to("trainer.update_epochs_per_batch"),
    "use_kl_loss": goes_to(ALGORITHM + "use_kl_loss"),
    "use_prefix_grouper": goes_to("trainer.share_group_prompts"),
    "checkpoint.async_save": goes_to("trainer.async_ckpt_save"),
    "loss_scale_factor": not_there("converted together with loss_agg_mode"),
    "freeze_vision_tower": only(False, does="there is no vision tower", otherwise="vision-language models"),
    "router_replay.mode": _router_replay,
    "router_replay.*": not_there("set by router_replay.mode"),
    "shuffle": only(False, does="samples keep their order", otherwise="shuffling samples between epochs of a batch"),
    "calculate_sum_pi_squared": only(False, does="off", otherwise="the optimal token baseline"),
}

_ROLLOUT: dict[str, Entry] = {
    "n": goes_to("generator.n_samples_per_prompt"),
    "temperature": goes_to(SAMPLING + "temperature", convert=number),
    "top_p": goes_to(SAMPLING + "top_p", convert=number),
    "top_k": goes_to(SAMPLING + "top_k"),
    "do_sample": only(True, does="responses are sampled", otherwise="greedy decoding in training"),
    "ignore_eos": only(
        False, does="responses end at an end-of-sequence token", otherwise="ignoring end-of-sequence tokens"
    ),
    "prompt_length": not_there("set by data.max_prompt_length"),
    "response_length": not_there("set by data.max_response_length"),
    "mode": not_there("every trajectory runs independently, as in verl's async mode"),
    "dtype": goes_to(ENGINE + "model_dtype"),
    "gpu_memory_utilization": goes_to(ENGINE + "gpu_memory_utilization", convert=number),
    "enforce_eager": goes_to(ENGINE + "enforce_eager"),
    "expert_parallel_size": goes_to(ENGINE + "expert_parallel_size"),
    "max_num_batched_tokens": goes_to(ENGINE + "max_num_batched_tokens"),
    "max_num_seqs": goes_to(ENGINE + "max_num_seqs"),
    "max_model_len": goes_to(ENGINE + "engine_init_kwargs.max_model_len"),
    "enable_chunked_prefill": goes_to(ENGINE + "enable_chunked_prefill"),
    "enable_prefix_caching": goes_to(ENGINE + "enable_prefix_caching"),
    "free_cache_engine": not_there("engines sleep when models take turns on GPUs"),
    "layered_summon": not_there("weights are transferred in buckets"),
    "multi_stage_wake_up": not_there("engines wake up in the order that memory allows"),
    "load_format": not_there("the learner's weights replace those that engines load"),
    "calculate_log_probs": not_there("engines return log-probabilities: see generator.sampling_params.logprobs"),
    "skip_tokenizer_init": not_there("engines receive token IDs"),
    "update_weights_bucket_megabytes": not_there("weights are transferred in buckets"),
    "disable_log_stats": not_there(_TRACES),
    "cudagraph_capture_sizes": later("CUDA graph sizes; set them in engine_init_kwargs.compilation_config"),
    "quantization": later("quantized engines"),
    "quantization_config_file": later("quantized engines"),
    "mtp": not_there("only used with actor_rollout_ref.model.mtp.enable, which is not implemented"),
    "logprobs_mode": only(
        "processed_logprobs", does="log-probabilities are those sampled from", otherwise="raw log-probabilities"
    ),
    "scheduling_policy": only("fcfs", does="requests are served in order", otherwise="request priorities"),
    "skip_dump_dir": not_there("only used with rollout.skip_rollout, which is not implemented"),
    "over_sample_rate": only(0, 0.0, does="all samples are awaited", otherwise="oversampling requests"),
    "enable_rollout_routing_replay": goes_to("generator.inference_engine.enable_return_routed_experts"),
    "skip_rollout": only(False, does="off", otherwise="recorded rollouts; see trainer.rollouts_from"),
    "val_kwargs.n": goes_to("generator.eval_n_samples_per_prompt"),
    "val_kwargs.temperature": goes_to(_EVAL + "temperature", convert=number),
    "val_kwargs.top_p": goes_to(_EVAL + "top_p", convert=number),
    "val_kwargs.top_k": goes_to(_EVAL + "top_k"),
    "val_kwargs.do_sample": lambda value: (
        Becomes(needless="evaluation samples with val_kwargs.temperature")
        if value
        else Becomes(writes={_EVAL + "greedy": True})
    ),
    "agent.num_workers": not_there("trajectories need no worker processes"),
    "agent.default_agent_loop": only(
        "single_turn_agent", does="a single turn is the default", otherwise="verl's agent loops; see docs/agents.md"
    ),
    "agent.*": later("verl's agent loops; see docs/agents.md"),
    "checkpoint_engine.*": not_there("set by generator.inference_engine.weight_sync_backend"),
}

_OF_CRITIC: dict[str, Entry] = {
    "optim.lr": goes_to(_CRITIC + "optimizer_config.lr", convert=number),
    "optim.weight_decay": goes_to(_CRITIC + "optimizer_config.weight_decay", convert=number),
    "optim.betas": goes_to(_CRITIC + "optimizer_config.adam_betas"),
    "optim.min_lr_ratio": goes_to(_CRITIC + "optimizer_config.min_lr_ratio"),
    "model.path": goes_to(_CRITIC + "model.path"),
    "model.lora_rank": goes_to(_CRITIC + "model.lora.rank"),
    "model.lora_alpha": goes_to(_CRITIC + "model.lora.alpha", convert=number),
    "model.trust_remote_code": only(False, does=_REMOTE_CODE, otherwise="running code from a model's repository"),
    **{f"model.{name}": not_there("one setting for all models, set by the policy's") for name in (
        "tokenizer_path", "enable_gradient_checkpointing", "enable_activation_offload", "use_remove_padding", "use_shm",
        "external_lib", "target_modules", "tiled_mlp.*", "override_config",
    )},
    "ppo_mini_batch_size": goes_to("trainer.critic_mini_batch_size"),
    "ppo_epochs": not_there("one setting for all models: trainer.update_epochs_per_batch"),
    "cliprange_value": goes_to(ALGORITHM + "value_clip", convert=number),
    "loss_agg_mode": not_there("the value loss is always averaged over tokens"),
    "shuffle": only(False, does="samples keep their order", otherwise="shuffling samples between epochs of a batch"),
    "rollout_n": not_there("set by generator.n_samples_per_prompt"),
    "data_loader_seed": not_there("samples keep their order"),
}  # fmt: skip

_DATA: dict[str, Entry] = {
    "train_files": batch_of_one_source("data.train_data"),
    "val_files": batch_of_one_source("data.val_data"),
    "prompt_key": goes_to("data.prompt_column"),
    "train_batch_size": goes_to("trainer.train_batch_size"),
    "val_batch_size": goes_to("trainer.eval_batch_size"),
    "max_prompt_length": goes_to("trainer.max_prompt_length"),
    "max_response_length": goes_to(SAMPLING + "max_generate_length"),
    "tokenizer": unless_empty("trainer.tokenizer_path"),
    "filter_overlong_prompts": not_there("longer prompts are skipped and counted"),
    "shuffle": goes_to("data.shuffle"),
    "validation_shuffle": not_there("evaluation uses every prompt, so order does not matter"),
    "seed": only(None, does="derived from trainer.seed", otherwise="a separate seed for the order of prompts"),
    "train_max_samples": only(-1, does="all rows are used", otherwise="a subset of rows; write it as NAME:train[:100]"),
    "val_max_samples": only(-1, does="all rows are used", otherwise="a subset of rows; write it as NAME:test[:100]"),
    "reward_fn_key": only("data_source", does="data_source is the default", otherwise="columns other than data_source"),
    "image_key": only("images", None, does="rows have no images", otherwise="vision-language rollouts"),
    "video_key": only("videos", None, does="rows have no videos", otherwise="vision-language rollouts"),
    "trust_remote_code": only(False, does=_REMOTE_CODE, otherwise="running code from a model's repository"),
    "gen_batch_size": not_there("prompts are drawn as needed"),
    "apply_chat_template_kwargs": later("a value for a whole table; set its fields instead", {}),
    "custom_cls.*": later("custom dataset classes; data.train_data accepts files, folders and Hub datasets", ""),
    "sampler.*": later("custom samplers", ""),
    "datagen.*": later("prompts generated during training", ""),
    "tool_config_path": later("converting verl's tools, which are environments here (docs/environments.md)"),
    **{name: not_there(_LOADERS) for name in (
        "use_shm", "return_raw_input_ids", "return_raw_chat", "return_full_prompt", "return_multi_modal_inputs",
        "dataloader_num_workers", "filter_overlong_prompts_workers", "image_patch_size",
    )},
}  # fmt: skip

_TRAINER: dict[str, Entry] = {
    "total_epochs": goes_to("trainer.epochs"),
    "total_training_steps": goes_to("trainer.max_training_steps"),
    "project_name": goes_to("trainer.project_name"),
    "experiment_name": goes_to("trainer.run_name"),
    "save_freq": goes_to("trainer.ckpt_interval"),
    "test_freq": goes_to("trainer.eval_interval"),
    "val_before_train": goes_to("trainer.eval_before_train"),
    "val_only": only(False, does="off", otherwise="evaluation-only runs; use `skyrl eval`"),
    "resume_from_path": unless_empty("trainer.resume_path"),
    "default_local_dir": goes_to("trainer.ckpt_path"),
    "max_actor_ckpt_to_keep": goes_to("trainer.max_ckpts_to_keep"),
    "max_critic_ckpt_to_keep": not_there("a checkpoint contains policy and critic"),
    "critic_warmup": only(
        0, does="the policy is trained from the first step", otherwise="training only the critic at first"
    ),
    "device": only("cuda", does="models run on GPUs", otherwise="devices other than CUDA"),
    "balance_batch": not_there("long and short samples are balanced across ranks"),
    "log_val_generations": not_there("evaluation samples are saved in the run folder: see `skyrl view`"),
    "rollout_data_dir": not_there("samples are saved in the run folder"),
    "validation_data_dir": not_there("evaluation samples are saved in the run folder"),
    "del_local_ckpt_after_load": not_there("trainer.max_ckpts_to_keep decides which checkpoints are kept"),
    "default_hdfs_dir": later("HDFS; trainer.ckpt_path may be an object store (docs/checkpoints.md)"),
    "esi_redundant_time": not_there("trainer.faults.stop_before stops a run before its machine shuts down"),
    "use_legacy_worker_impl": not_there("there is only one worker implementation"),
    "ray_wait_register_center_timeout": not_there("timeouts are set in trainer.placement"),
}

KEYS: dict[str, Entry] = {
    "*._target_": not_there("names a verl class"),
    **{f"actor_rollout_ref.model.{name}": entry for name, entry in _MODEL.items()},
    **{f"actor_rollout_ref.actor.{name}": entry for name, entry in _ACTOR.items()},
    **{f"actor_rollout_ref.rollout.{name}": entry for name, entry in _ROLLOUT.items()},
    **{f"critic.{name}": entry for name, entry in _OF_CRITIC.items()},
    **{f"data.{name}": entry for name, entry in _DATA.items()},
    **{f"trainer.{name}": entry for name, entry in _TRAINER.items()},
    "actor_rollout_ref.hybrid_engine": only(
        True, does="engines share the learners' GPUs", otherwise="engines on separate GPUs"
    ),
    "actor_rollout_ref.nccl_timeout": not_there("timeouts are set in trainer.placement"),
    "actor_rollout_ref.rollout.trace.*": not_there(_TRACES),
    "actor_rollout_ref.rollout.prometheus.*": not_there(_TRACES),
    "algorithm.gamma": goes_to(ALGORITHM + "gamma", convert=number),
    "algorithm.lam": goes_to(ALGORITHM + "lambd", convert=number),
    "algorithm.norm_adv_by_std_in_grpo": goes_to(ALGORITHM + "grpo_norm_by_std"),
    "algorithm.use_kl_in_reward": goes_to(ALGORITHM + "use_kl_in_reward"),
    "algorithm.use_pf_ppo": only(False, does="off", otherwise="PF-PPO, which resamples by reward"),
    "algorithm.pf_ppo.*": not_there("only used with algorithm.use_pf_ppo, which is not implemented"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": only(
        False, does="weights are not normalized", otherwise="batch-normalized importance weights"
    ),
    "*.optim.optimizer": only("AdamW", "adamw", does="AdamW is the default optimizer", otherwise="other optimizers"),
    "*.optim.optimizer_impl": only(
        "torch.optim", does="torch's optimizers are used", otherwise="optimizers from other packages"
    ),
    "*.optim.num_cycles": only(
        0.5, does="a cosine schedule decays once", otherwise="a cosine schedule with several cycles"
    ),
    "*.optim.total_training_steps": not_there("derived from the data and the number of epochs"),
    "*.optim.override_optimizer_config*": later("additional optimizer arguments"),
    "*.optim.lr_decay_style": only("constant", does="the learning rate is constant", otherwise="Megatron's schedules"),
    "*.fsdp_config.param_offload": not_there(_SHARED),
    "*.fsdp_config.model_dtype": only(
        "fp32", "float32", does="master weights are always float32", otherwise="other weight dtypes"
    ),
    "*.fsdp_config.mixed_precision": later("a value for a whole table; set its fields instead"),
    "*.fsdp_config.full_determinism": goes_to("trainer.deterministic"),
    "*.fsdp_config.*": not_there("FSDP2 wraps layers one by one"),
    "*.use_torch_compile": not_there(_KERNELS),
    "*.use_remove_padding": not_there("one setting for all models: trainer.use_sample_packing"),
    "*.use_fused_kernels": not_there(_KERNELS),
    "*.entropy_from_logits_with_chunking": not_there(_KERNELS),
    "*.entropy_checkpointing": not_there(_KERNELS),
    "*.sum_pi_squared_checkpointing": not_there(_KERNELS),
    "*.calculate_entropy": not_there("entropy is always logged"),
    "*.data_loader_seed": not_there("samples keep their order"),
    "*.rollout_n": not_there("set by generator.n_samples_per_prompt"),
    "critic.checkpoint.async_save": not_there("one setting for all models: trainer.async_ckpt_save"),
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": not_there("the reference model has no optimizer"),
    "*.load_contents": not_there("checkpoints are always loaded in full"),
    "*.router_replay.*": not_there("set by the policy's settings"),
    "reward_manager.source": later("custom reward managers; set environment.env_class to a function", "register"),
    "reward_manager.name": not_there("set by reward_model.reward_manager"),
    "reward_manager.module.*": not_there("only used with a custom reward_manager.source, which is not implemented"),
    "transfer_queue.*": only(False, does="off", otherwise="verl's transfer queue"),
    "ray_kwargs.*": not_there("the connection to Ray is set in trainer.placement"),
    "ray_init.*": not_there("the connection to Ray is set in trainer.placement"),
}
