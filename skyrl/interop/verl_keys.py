"""verl's settings that convert independently."""

from __future__ import annotations

from skyrl.interop.areal_values import (
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
_LOADERS = "how verl reads files; here rows are read once, and cut into prompts beforehand"
_KERNELS = "a faster way to the same numbers; learners here choose theirs themselves"
_SHARED = "weights move to the host where models take turns on GPUs"
_TRACES = "what verl logs of its engines; here every engine has a file below trainer.log_path"
_REMOTE_CODE = "code of a model's repository is not run"


def _router_replay(value: object) -> Becomes:
    """Convert routing replay: R3 replays the experts of the rollout, R2 the learner's in the old log-probabilities."""
    if value == "R3":
        returned = "generator.inference_engine.enable_return_routed_experts"
        return Becomes(writes={_POLICY + "moe_enable_routing_replay": True, returned: True})
    if value in ("disabled", None):
        return Becomes(needless="off")
    return Becomes(not_yet="replaying the experts that the learner chose for the old log-probabilities")


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
    "lora.*": later("Megatron's own adapters"),
    "lora_adapter_path": later("training that starts from an adapter: merge it first (docs/lora-and-export.md)", ""),
    "enable_gradient_checkpointing": goes_to("trainer.gradient_checkpointing"),
    "enable_activation_offload": goes_to("trainer.offload_activations"),
    "use_remove_padding": goes_to("trainer.use_sample_packing"),
    "use_liger": not_there(_KERNELS),
    "use_fused_kernels": not_there(_KERNELS),
    "fused_kernel_options.*": not_there(_KERNELS),
    "tiled_mlp.*": not_there(_KERNELS),
    "trust_remote_code": only(False, does=_REMOTE_CODE, otherwise="code of a model's repository"),
    "custom_chat_template": later("a chat template within the file: generator.chat_template takes a file of it"),
    "external_lib": later("a module that is imported for its effects"),
    "hf_config_path": later("a configuration of the model in another place", ""),
    "use_shm": not_there("models are read from where they are"),
    "torch_dtype": not_there("master weights are float32"),
    "override_config": later("settings of a table as a whole", {}),
    "mtp.enable": only(False, None, does="off", otherwise="multi-token prediction"),
    "mtp.*": not_there("mtp.enable says whether it is on"),
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
    "loss_scale_factor": not_there("loss_agg_mode takes it"),
    "freeze_vision_tower": only(False, does="there is none", otherwise="vision-language models"),
    "router_replay.mode": _router_replay,
    "router_replay.*": not_there("router_replay.mode says it"),
    "shuffle": only(False, does="samples stay in order", otherwise="shuffling samples between epochs of a batch"),
    "calculate_sum_pi_squared": only(False, does="off", otherwise="the optimal token baseline"),
}

_ROLLOUT: dict[str, Entry] = {
    "n": goes_to("generator.n_samples_per_prompt"),
    "temperature": goes_to(SAMPLING + "temperature", convert=number),
    "top_p": goes_to(SAMPLING + "top_p", convert=number),
    "top_k": goes_to(SAMPLING + "top_k"),
    "do_sample": only(True, does="samples are drawn", otherwise="greedy training samples"),
    "ignore_eos": only(False, does="an end-of-sequence token ends an answer", otherwise="answers without an end"),
    "prompt_length": not_there("data.max_prompt_length says it"),
    "response_length": not_there("data.max_response_length says it"),
    "mode": not_there("every trajectory runs on its own, as in verl's async mode"),
    "dtype": goes_to(ENGINE + "model_dtype"),
    "gpu_memory_utilization": goes_to(ENGINE + "gpu_memory_utilization", convert=number),
    "enforce_eager": goes_to(ENGINE + "enforce_eager"),
    "expert_parallel_size": goes_to(ENGINE + "expert_parallel_size"),
    "max_num_batched_tokens": goes_to(ENGINE + "max_num_batched_tokens"),
    "max_num_seqs": goes_to(ENGINE + "max_num_seqs"),
    "max_model_len": goes_to(ENGINE + "engine_init_kwargs.max_model_len"),
    "enable_chunked_prefill": goes_to(ENGINE + "enable_chunked_prefill"),
    "enable_prefix_caching": goes_to(ENGINE + "enable_prefix_caching"),
    "free_cache_engine": not_there("engines sleep where models take turns on GPUs"),
    "layered_summon": not_there("weights travel in pieces"),
    "multi_stage_wake_up": not_there("engines wake in the order that memory allows"),
    "load_format": not_there("the learner's weights replace those that an engine loads"),
    "calculate_log_probs": not_there("engines return log-probabilities: generator.sampling_params.logprobs"),
    "skip_tokenizer_init": not_there("engines are given tokens"),
    "update_weights_bucket_megabytes": not_there("weights travel in pieces"),
    "disable_log_stats": not_there(_TRACES),
    "cudagraph_capture_sizes": later("chosen sizes of CUDA graphs: engine_init_kwargs.compilation_config has them"),
    "quantization": later("quantized engines"),
    "quantization_config_file": later("quantized engines"),
    "mtp": not_there("actor_rollout_ref.model.mtp.enable says whether it is on"),
    "logprobs_mode": only("processed_logprobs", does="log-probabilities are those drawn from", otherwise="raw ones"),
    "scheduling_policy": only("fcfs", does="requests run in order", otherwise="priorities of requests"),
    "skip_dump_dir": not_there("rollouts are sampled: rollout.skip_rollout says otherwise"),
    "over_sample_rate": only(0, 0.0, does="every sample is waited for", otherwise="requests beyond those needed"),
    "enable_rollout_routing_replay": goes_to("generator.inference_engine.enable_return_routed_experts"),
    "skip_rollout": only(False, does="off", otherwise="rollouts of another run: trainer.rollouts_from"),
    "val_kwargs.n": goes_to("generator.eval_n_samples_per_prompt"),
    "val_kwargs.temperature": goes_to(_EVAL + "temperature", convert=number),
    "val_kwargs.top_p": goes_to(_EVAL + "top_p", convert=number),
    "val_kwargs.top_k": goes_to(_EVAL + "top_k"),
    "val_kwargs.do_sample": lambda value: (
        Becomes(needless="evaluation samples at val_kwargs.temperature")
        if value
        else Becomes(writes={_EVAL + "greedy": True})
    ),
    "agent.num_workers": not_there("trajectories need no processes of their own"),
    "agent.default_agent_loop": only(
        "single_turn_agent", does="one turn is the default", otherwise="verl's agent loops: docs/agents.md"
    ),
    "agent.*": later("verl's agent loops: docs/agents.md"),
    "checkpoint_engine.*": not_there("weights travel by generator.inference_engine.weight_sync_backend"),
}

_OF_CRITIC: dict[str, Entry] = {
    "optim.lr": goes_to(_CRITIC + "optimizer_config.lr", convert=number),
    "optim.weight_decay": goes_to(_CRITIC + "optimizer_config.weight_decay", convert=number),
    "optim.betas": goes_to(_CRITIC + "optimizer_config.adam_betas"),
    "optim.min_lr_ratio": goes_to(_CRITIC + "optimizer_config.min_lr_ratio"),
    "model.path": goes_to(_CRITIC + "model.path"),
    "model.lora_rank": goes_to(_CRITIC + "model.lora.rank"),
    "model.lora_alpha": goes_to(_CRITIC + "model.lora.alpha", convert=number),
    "model.trust_remote_code": only(False, does=_REMOTE_CODE, otherwise="code of a model's repository"),
    **{f"model.{name}": not_there("as the policy's, and here one setting for all models") for name in (
        "tokenizer_path", "enable_gradient_checkpointing", "enable_activation_offload", "use_remove_padding", "use_shm",
        "external_lib", "target_modules", "tiled_mlp.*", "override_config",
    )},
    "ppo_mini_batch_size": goes_to("trainer.critic_mini_batch_size"),
    "ppo_epochs": not_there("trainer.update_epochs_per_batch is for policy and critic"),
    "cliprange_value": goes_to(ALGORITHM + "value_clip", convert=number),
    "loss_agg_mode": not_there("values are averaged over tokens"),
    "shuffle": only(False, does="samples stay in order", otherwise="shuffling samples between epochs of a batch"),
    "rollout_n": not_there("generator.n_samples_per_prompt says it"),
    "data_loader_seed": not_there("samples stay in order"),
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
    "filter_overlong_prompts": not_there("longer prompts are left out of the data, and counted"),
    "shuffle": only(True, does="prompts are shuffled", otherwise="prompts in the order of their file"),
    "validation_shuffle": not_there("the order of evaluation changes nothing"),
    "seed": only(None, does="it follows from trainer.seed", otherwise="a seed for the order of prompts alone"),
    "train_max_samples": only(-1, does="all rows", otherwise="a part of the rows: NAME:train[:100] is one"),
    "val_max_samples": only(-1, does="all rows", otherwise="a part of the rows: NAME:test[:100] is one"),
    "reward_fn_key": only("data_source", does="the column data_source", otherwise="another column than data_source"),
    "image_key": only("images", None, does="rows have none", otherwise="vision-language rollouts"),
    "video_key": only("videos", None, does="rows have none", otherwise="vision-language rollouts"),
    "trust_remote_code": only(False, does=_REMOTE_CODE, otherwise="code of a model's repository"),
    "gen_batch_size": not_there("prompts are drawn as they are needed"),
    "apply_chat_template_kwargs": later("settings of a table as a whole", {}),
    "custom_cls.*": later("a dataset class: data.train_data takes files, folders and names of the hub", ""),
    "sampler.*": later("an order of prompts by a class of one's own", ""),
    "datagen.*": later("prompts that are made while training", ""),
    "tool_config_path": later("converting verl's tools: they are environments here (docs/environments.md)"),
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
    "val_only": only(False, does="it trains", otherwise="a run that only evaluates: `skyrl eval`"),
    "resume_from_path": unless_empty("trainer.resume_path"),
    "default_local_dir": goes_to("trainer.ckpt_path"),
    "max_actor_ckpt_to_keep": goes_to("trainer.max_ckpts_to_keep"),
    "max_critic_ckpt_to_keep": not_there("a checkpoint holds policy and critic"),
    "critic_warmup": only(0, does="the policy learns from the first step", otherwise="training the critic alone first"),
    "device": only("cuda", does="models compute on GPUs", otherwise="other devices than CUDA's"),
    "balance_batch": not_there("long and short samples are dealt out evenly"),
    "log_val_generations": not_there("evaluated samples are kept in the run's folder (`skyrl view`)"),
    "rollout_data_dir": not_there("samples are kept in the run's folder"),
    "validation_data_dir": not_there("evaluated samples are kept in the run's folder"),
    "del_local_ckpt_after_load": not_there("trainer.max_ckpts_to_keep decides what is kept"),
    "default_hdfs_dir": later("HDFS: trainer.ckpt_path may be an object store (docs/checkpoints.md)"),
    "esi_redundant_time": not_there("trainer.faults.stop_before ends a run before its machine does"),
    "use_legacy_worker_impl": not_there("there is one implementation"),
    "ray_wait_register_center_timeout": not_there("trainer.placement has the deadlines"),
}

KEYS: dict[str, Entry] = {
    "*._target_": not_there("the name of a class of verl's"),
    **{f"actor_rollout_ref.model.{name}": entry for name, entry in _MODEL.items()},
    **{f"actor_rollout_ref.actor.{name}": entry for name, entry in _ACTOR.items()},
    **{f"actor_rollout_ref.rollout.{name}": entry for name, entry in _ROLLOUT.items()},
    **{f"critic.{name}": entry for name, entry in _OF_CRITIC.items()},
    **{f"data.{name}": entry for name, entry in _DATA.items()},
    **{f"trainer.{name}": entry for name, entry in _TRAINER.items()},
    "actor_rollout_ref.hybrid_engine": only(True, does="engines share the GPUs", otherwise="engines apart"),
    "actor_rollout_ref.nccl_timeout": not_there("trainer.placement has the deadlines"),
    "actor_rollout_ref.rollout.trace.*": not_there(_TRACES),
    "actor_rollout_ref.rollout.prometheus.*": not_there(_TRACES),
    "algorithm.gamma": goes_to(ALGORITHM + "gamma", convert=number),
    "algorithm.lam": goes_to(ALGORITHM + "lambd", convert=number),
    "algorithm.norm_adv_by_std_in_grpo": goes_to(ALGORITHM + "grpo_norm_by_std"),
    "algorithm.use_kl_in_reward": goes_to(ALGORITHM + "use_kl_in_reward"),
    "algorithm.use_pf_ppo": only(False, does="off", otherwise="PF-PPO, which draws samples anew by their rewards"),
    "algorithm.pf_ppo.*": not_there("algorithm.use_pf_ppo says whether it is on"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": only(
        False, does="weights are as they are", otherwise="weights that a batch normalizes"
    ),
    "*.optim.optimizer": only("AdamW", "adamw", does="AdamW is the optimizer", otherwise="other optimizers"),
    "*.optim.optimizer_impl": only("torch.optim", does="torch's own", otherwise="optimizers of other packages"),
    "*.optim.num_cycles": only(0.5, does="a cosine falls once", otherwise="a cosine that rises again"),
    "*.optim.total_training_steps": not_there("the length of the run follows from data and epochs"),
    "*.optim.override_optimizer_config*": later("further arguments of an optimizer"),
    "*.optim.lr_decay_style": only("constant", does="the rate stays", otherwise="Megatron's schedules"),
    "*.fsdp_config.param_offload": not_there(_SHARED),
    "*.fsdp_config.model_dtype": only("fp32", "float32", does="master weights are float32", otherwise="other weights"),
    "*.fsdp_config.mixed_precision.param_dtype": only("bf16", does="as trainer.bf16", otherwise="other types"),
    "*.fsdp_config.mixed_precision.*": not_there("gradients are added up in float32"),
    "*.fsdp_config.dtype": only("bfloat16", does="as trainer.bf16", otherwise="other types than bfloat16"),
    "*.fsdp_config.full_determinism": goes_to("trainer.deterministic"),
    "*.fsdp_config.*": not_there("FSDP2 here: layers are wrapped one by one"),
    "*.use_torch_compile": not_there(_KERNELS),
    "*.use_remove_padding": not_there("trainer.use_sample_packing is for all models"),
    "*.use_fused_kernels": not_there(_KERNELS),
    "*.entropy_from_logits_with_chunking": not_there(_KERNELS),
    "*.entropy_checkpointing": not_there(_KERNELS),
    "*.sum_pi_squared_checkpointing": not_there(_KERNELS),
    "*.calculate_entropy": not_there("the entropy is logged"),
    "*.data_loader_seed": not_there("samples stay in order"),
    "*.rollout_n": not_there("generator.n_samples_per_prompt says it"),
    "critic.checkpoint.async_save": not_there("trainer.async_ckpt_save is for all models"),
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": not_there("the reference has no optimizer"),
    "*.load_contents": not_there("a checkpoint is loaded whole"),
    "*.router_replay.*": not_there("the policy's says it"),
    "reward_manager.source": later("reward managers of one's own: environment.env_class takes a function", "register"),
    "reward_manager.name": not_there("reward_model.reward_manager says it"),
    "reward_manager.module.*": not_there("reward_manager.source says whether it is one of verl's own"),
    "transfer_queue.*": only(False, does="off", otherwise="verl's transfer queue"),
    "ray_kwargs.*": not_there("trainer.placement says how Ray is reached"),
    "ray_init.*": not_there("trainer.placement says how Ray is reached"),
}
