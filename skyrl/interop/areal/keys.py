"""The meaning of each of AReaL's settings in our tree.

Keys are patterns: `*` matches one or more names. An entry is a path of ours, or a function from the value to its
conversion: see `interop/conversions.py`.
"""

from __future__ import annotations

from skyrl.interop.conversions import (
    ALGORITHM,
    ENGINE,
    OPTIMIZER,
    SAMPLING,
    SHAPING,
    Entry,
    batch_of_one_source,
    decoupled,
    dynamic,
    goes_to,
    inverted,
    kl,
    later,
    least_micro_batches,
    level,
    negated,
    not_there,
    number,
    only,
    optimizer_keys,
    overlong,
    recovery,
    success_rate,
    switches_on,
    top_k_at,
    unless_empty,
    whole_prefill,
)

_INTERVALS = "intervals other than those of exports, checkpoints and evaluation"
_SGLANG = "SGLang options, because the engines become vLLM; --keep-engine keeps SGLang and its options"
_LOGS = "each engine has a log file under trainer.log_path"
_LEAST = "one setting for all models: trainer.min_microbatches; it does not affect results"
_TOKENS = "one setting for all models: trainer.max_tokens_per_microbatch; it does not affect results"
_FOLDERS = "folders are set once: trainer.run_path, ckpt_path and export_path"
_NAMES = "names are set once: trainer.project_name and trainer.run_name"
_LEGACY = "settings of AReaL's legacy system"

_LOADED = "pretrained weights are loaded"

INTERVALS: dict[str, str] = {
    **{f"{name}.freq_": path for name, path in (
        ("saver", "trainer.hf_save_interval"),
        ("recover", "trainer.ckpt_interval"),
        ("evaluator", "trainer.eval_interval"),
    )},
    **{f"exp_ctrl.{name}_freq_": path for name, path in (
        ("save", "trainer.hf_save_interval"),
        ("ckpt", "trainer.ckpt_interval"),
        ("eval", "trainer.eval_interval"),
    )},
}  # fmt: skip
"""Our equivalent of each group of `epochs`, `steps` and `secs`, any of which may trigger."""

KEYS: dict[str, Entry] = {
    "experiment_name": goes_to("trainer.project_name"),
    "trial_name": goes_to("trainer.run_name"),
    "*.experiment_name": not_there(_NAMES),
    "*.trial_name": not_there(_NAMES),
    "*.fileroot": not_there(_FOLDERS),
    "cluster.fileroot": goes_to("trainer.ckpt_path", convert=lambda value: f"{str(value).rstrip('/')}/checkpoints"),
    "seed": goes_to("trainer.seed"),
    "total_train_epochs": goes_to("trainer.epochs"),
    "exp_ctrl.total_train_epochs": goes_to("trainer.epochs"),
    "total_train_steps": goes_to("trainer.max_training_steps"),
    "total_train_n_seqs": goes_to("trainer.max_training_prompts"),
    "tokenizer_path": unless_empty("trainer.tokenizer_path"),
    "async_training": goes_to("trainer.fully_async.enabled"),
    "max_turns": goes_to("generator.max_turns"),
    # models
    "actor.path": goes_to("trainer.policy.model.path"),
    "ref.path": goes_to("trainer.ref.model.path"),
    "critic.path": goes_to("trainer.critic.model.path"),
    "critic.eps_clip": goes_to(ALGORITHM + "value_clip", convert=number),
    "critic.is_critic": only(True, does="critics always have a value head", otherwise="a critic without a value head"),
    "critic.mask_no_eos_with_zero": not_there("set by actor.mask_no_eos_with_zero"),
    **optimizer_keys(
        "critic.optimizer.", "trainer.critic.optimizer_config.", "trainer.critic.fsdp_config.cpu_offload"
    ),
    **{
        f"{theirs}.init_from_scratch": switches_on(f"trainer.{ours}.model.init_from_scratch", off=_LOADED)
        for theirs, ours in (("actor", "policy"), ("ref", "ref"), ("critic", "critic"))
    },
    "*.init_from_scratch": only(False, does=_LOADED, otherwise="random initialization of other models"),
    "actor.disable_dropout": inverted("trainer.policy.use_dropout", on="dropout is off by default"),
    "critic.disable_dropout": inverted("trainer.critic.use_dropout", on="dropout is off by default"),
    "*.disable_dropout": not_there("dropout is off in models that are not trained"),
    "actor.gradient_checkpointing": goes_to("trainer.gradient_checkpointing"),
    "actor.bf16": goes_to("trainer.bf16"),
    "ref.dtype": not_there("one setting for all models: trainer.bf16"),
    "ref.bf16": not_there("one setting for all models: trainer.bf16"),
    "actor.mb_spec.max_tokens_per_mb": goes_to("trainer.max_tokens_per_microbatch"),
    "actor_train.mb_spec.max_tokens_per_mb": goes_to("trainer.max_tokens_per_microbatch"),
    "*.mb_spec.max_tokens_per_mb": not_there(_TOKENS),
    "actor.mb_spec.n_mbs": least_micro_batches,
    "actor_train.mb_spec.n_mbs": least_micro_batches,
    "*.mb_spec.n_mbs": not_there(_LEAST),
    "*.mb_spec.granularity": not_there("samples of the same prompt always stay together"),
    "*.pad_to_maximum": only(True, False, does="padding does not affect results", otherwise="other padding"),
    "*.type._class": not_there("the architecture is read from the model"),
    "actor.attn_impl": goes_to("trainer.attention"),
    "ref.attn_impl": not_there("one setting for all models: trainer.attention"),
    "*.is_critic": only(False, does="off", otherwise="reward models"),
    "actor.grad_reduce_dtype": goes_to("trainer.policy.fsdp_config.mixed_precision.reduce_dtype"),
    "ref.grad_reduce_dtype": not_there("the reference model has no gradients"),
    "*.ds_auto_tp": later("a value for a whole table; set its fields instead"),
    # optimizer
    **optimizer_keys("actor.optimizer.", OPTIMIZER, "trainer.policy.fsdp_config.cpu_offload"),
    "ref.optimizer": only(
        None, does="the reference model has no optimizer", otherwise="an optimizer for the reference model"
    ),
    # objective
    "actor.eps_clip": goes_to(ALGORITHM + "eps_clip_low", ALGORITHM + "eps_clip_high", convert=number),
    "ppo.eps_clip": goes_to(ALGORITHM + "eps_clip_low", ALGORITHM + "eps_clip_high", convert=number),
    "actor.eps_clip_higher": goes_to(ALGORITHM + "eps_clip_high", convert=number),
    "actor.c_clip": goes_to(ALGORITHM + "clip_ratio_c", convert=number),
    "ppo.c_clip": goes_to(ALGORITHM + "clip_ratio_c", convert=number),
    "actor.temperature": goes_to(ALGORITHM + "temperature", convert=number),
    "actor.kl_ctl": kl,
    "ppo.kl_ctl": kl,
    "actor.discount": goes_to(ALGORITHM + "gamma", convert=number),
    "ppo.discount": goes_to(ALGORITHM + "gamma", convert=number),
    "ppo.gae_lambda": goes_to(ALGORITHM + "lambd", convert=number),
    "ppo.value_eps_clip": goes_to(ALGORITHM + "value_clip", convert=number),
    "ppo.disable_value": only(True, does="no critic is trained", otherwise="a critic without a model path"),
    "ppo.use_adaptive_kl_ctl": goes_to(ALGORITHM + "kl_ctrl.type", convert=lambda on: "adaptive" if on else "fixed"),
    "ppo.adv_norm": goes_to(ALGORITHM + "advantage_batch_normalize"),
    "group_adv_norm": later("normalizing advantages twice", False),
    "actor.reward_norm": later("a value for a whole table; set its fields instead"),
    "actor.reward_norm.mean_level": level(SHAPING + "norm.mean_level"),
    "actor.reward_norm.std_level": level(SHAPING + "norm.std_level"),
    "actor.reward_norm.mean_leave1out": goes_to(SHAPING + "norm.mean_leave1out"),
    "actor.reward_norm.std_unbiased": goes_to(SHAPING + "norm.std_unbiased"),
    "actor.reward_norm.eps": goes_to(SHAPING + "norm.eps", convert=number),
    "actor.reward_norm.group_size": not_there("set by generator.n_samples_per_prompt"),
    "actor.adv_norm.group_size": not_there("set by generator.n_samples_per_prompt"),
    "actor.group_size": not_there("set by generator.n_samples_per_prompt"),
    "group_size": goes_to("generator.n_samples_per_prompt"),
    "actor.reward_scaling": goes_to(SHAPING + "scale", convert=number),
    "actor.reward_bias": goes_to(SHAPING + "bias", convert=number),
    "actor.reward_clip": goes_to(SHAPING + "clip", convert=number),
    "ppo.reward_output_scaling": goes_to(SHAPING + "scale", convert=number),
    "ppo.reward_output_bias": goes_to(SHAPING + "bias", convert=negated),
    "ppo.max_reward_clip": goes_to(SHAPING + "clip", convert=number),
    "actor.mask_no_eos_with_zero": goes_to("generator.zero_reward_on_non_stop"),
    "*.use_decoupled_loss": decoupled,
    "*.behav_imp_weight_cap": goes_to(ALGORITHM + "decoupled.behav_imp_weight_cap", convert=number),
    "actor.dynamic_sampling": dynamic,
    "actor.overlong_reward_penalty": overlong,
    "actor.overlong_tokens": goes_to(SHAPING + "overlong.buffer_len"),
    "actor.overlong_penalty_factor": goes_to(SHAPING + "overlong.penalty_factor", convert=number),
    "actor.max_new_tokens": not_there("set by generator.sampling_params.max_generate_length"),
    "actor.log_agent_stats*": not_there("metrics from get_metrics() are always logged, as environment/<name>"),
    "mask_too_long": goes_to("generator.apply_overlong_filtering"),
    # sampling
    "gconfig.n_samples": goes_to("generator.n_samples_per_prompt"),
    "ppo.gen.max_new_tokens": goes_to(SAMPLING + "max_generate_length"),
    "ppo.gen.min_new_tokens": goes_to(SAMPLING + "min_new_tokens"),
    "ppo.gen.greedy": goes_to(SAMPLING + "greedy"),
    "ppo.gen.top_p": goes_to(SAMPLING + "top_p", convert=number),
    "ppo.gen.top_k": top_k_at(SAMPLING + "top_k"),
    "ppo.gen.temperature": goes_to(SAMPLING + "temperature", convert=number),
    "ppo.gen.n": only(1, does="set by group_size", otherwise="more than one completion per sample"),
    # data
    "train_dataset.path": batch_of_one_source("data.train_data"),
    "dataset.path": batch_of_one_source("data.train_data"),
    "valid_dataset.path": batch_of_one_source("data.val_data"),
    "train_dataset.batch_size": goes_to("trainer.train_batch_size"),
    "dataset.train_bs_n_seqs": goes_to("trainer.train_batch_size"),
    "valid_dataset.batch_size": goes_to("trainer.eval_batch_size"),
    "train_dataset.max_length": goes_to("trainer.max_prompt_length"),
    "dataset.max_prompt_len": goes_to("trainer.max_prompt_length"),
    "train_dataset.shuffle": goes_to("data.shuffle"),
    "shuffle_dataset": goes_to("data.shuffle"),
    "valid_dataset.shuffle": not_there("evaluation uses every prompt, so order does not matter"),
    "*_dataset.pin_memory": not_there("prompts are text, so pinned memory does not apply"),
    "valid_dataset.drop_last": only(False, does="evaluation uses every prompt", otherwise="dropping prompts"),
    "valid_dataset.max_length": not_there("one setting for all data: trainer.max_prompt_length"),
    "*_dataset.type": only("rl", does="rows are prompts", otherwise="this type of rows in an RL run"),
    "success_rate_lb": success_rate("min_success_rate", everything=0.0),
    "success_rate_ub": success_rate("max_success_rate", everything=1.0),
    # engines
    "rollout.max_head_offpolicyness": goes_to("trainer.fully_async.max_staleness_steps"),
    "max_head_offpolicyness": goes_to("trainer.fully_async.max_staleness_steps"),
    "rollout.max_concurrent_rollouts": goes_to("trainer.fully_async.num_parallel_generation_workers"),
    "rollout.consumer_batch_size": not_there("derived from trainer.train_batch_size"),
    "rollout.schedule_policy": only(
        "round_robin", does="samples are distributed evenly", otherwise="other scheduling policies"
    ),
    "rollout.check_trajectory_format": not_there("trajectories are always type-checked"),
    "rollout.queue_size": goes_to("trainer.fully_async.queue_size"),
    "*sglang.model_path": not_there("engines always serve the policy"),
    "*sglang.random_seed": not_there("sampling seeds are derived from trainer.seed"),
    "*sglang.skip_tokenizer_init": not_there("engines receive token IDs"),
    "*sglang.dtype": goes_to(ENGINE + "model_dtype"),
    "*sglang.max_running_requests": goes_to(ENGINE + "max_num_seqs"),
    "*sglang.context_length": goes_to(ENGINE + "engine_init_kwargs.max_model_len"),
    "*sglang.mem_fraction_static": goes_to(ENGINE + "gpu_memory_utilization", convert=number),
    "*sglang.disable_cuda_graph": goes_to(ENGINE + "enforce_eager"),
    "*sglang.disable_radix_cache": goes_to(ENGINE + "enable_prefix_caching", convert=lambda off: not off),
    "*sglang.max_prefill_tokens": goes_to(ENGINE + "max_num_batched_tokens"),
    "*sglang.chunked_prefill_size": whole_prefill,
    "*sglang.kv_cache_dtype": goes_to(ENGINE + "engine_init_kwargs.kv_cache_dtype"),
    "*sglang.cpu_offload_gb": goes_to(ENGINE + "engine_init_kwargs.cpu_offload_gb"),
    "*sglang.enable_multimodal": later("vision-language rollouts", False, None),
    **{f"*sglang.{name}": not_there(_LOGS) for name in ("log_*", "decode_log_interval", "show_time_cost")},
    "*sglang.*": later(_SGLANG, False, ""),
    # keeping and watching
    "*.freq_*": later(_INTERVALS),  # unknown groups only: known ones are converted together by INTERVALS
    "exp_ctrl.*": later(_INTERVALS),
    "recover.mode": recovery("trainer.recover_mode"),
    "recover_mode": recovery("trainer.recover_mode"),
    "recover.retries": goes_to("trainer.recover_retries"),
    "recover_retries": goes_to("trainer.recover_retries"),
    "recover_after": later("a delay before a failed run is restarted"),
    # machines
    "cluster.cluster_name": not_there("only a label"),
    "scheduler.*": later("settings of AReaL's services other than their addresses"),
    "launcher.*": later("launcher settings beyond those in docs/launching.md"),
    "metric_discovery_port": later("metrics served on a port", 0),
    # AReaL's older system
    "actor_train.*": later(_LEGACY),
    "actor_inf.*": later(_LEGACY),
    "ref_inf.*": later(_LEGACY),
    "ppo.actor_sample_reuse": goes_to("trainer.update_epochs_per_batch"),
    "ppo.critic_sample_reuse": later(_LEGACY, 1),
    "ppo.early_stop_imp_ratio": goes_to(ALGORITHM + "max_importance_ratio", convert=number),
    "ppo.fuse_rew_ref": not_there("affects only how AReaL's legacy system overlaps two passes"),
    "rw_type": later("reward types; set environment.env_class instead", "sparse"),
    "cache_clear_freq": not_there("memory is freed when models take turns on GPUs"),
    "torch_cache_mysophobia": goes_to("trainer.policy.megatron_config.empty_cuda_cache"),
    "flush_request_timeout": goes_to("trainer.placement.call_timeout_seconds", convert=number),
    "n_rollout_workers": later("rollout worker processes"),
}  # fmt: skip
"""AReaL's key or pattern -> entry. An exact key takes precedence, then the first matching pattern."""
