"""TRL's settings that convert independently: those of `GRPOConfig`, and of its base class `TrainingArguments`."""

from __future__ import annotations

from typing import Any

from skyrl.interop.areal_values import (
    OPTIMIZER,
    SAMPLING,
    Becomes,
    Entry,
    goes_to,
    later,
    not_there,
    number,
    only,
)

_LOGS = "every step is logged, and its samples are kept in the run's folder"
_HUB = "exports go to trainer.export_path; uploading them is the hub's own command"
_LOADING = "rows are read once and cut into prompts beforehand"
_SHARDED = "models are spread over ranks by trainer.strategy"
_KERNELS = "a faster way to the same numbers; learners here choose theirs themselves"
_CACHES = "the embedded engine has one cache; vLLM has its own"
_PEFT = "no part of the adapters here: every projection gets the same"
_VESPO = "settings of the loss vespo, which is not there"
_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant_with_warmup",
    "cosine_with_min_lr": "cosine_with_min_lr", "cosine_with_restarts": "cosine_with_restarts",
    "polynomial": "polynomial", "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "warmup_stable_decay",
}  # fmt: skip


def _whole_number(value: object) -> Any:
    """A whole float as an int: `num_train_epochs = 3.0` becomes 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _scheduler(value: object) -> Becomes:
    name = _SCHEDULES.get(str(value).removeprefix("SchedulerType.").lower())
    return Becomes(writes={OPTIMIZER + "scheduler": name}) if name else Becomes(not_yet=f"the schedule {value!r}")


def _schedule_settings(value: object) -> Becomes:
    if not value:
        return Becomes(needless="asks for nothing")
    if isinstance(value, dict) and set(value) <= {"min_lr_rate"}:
        return Becomes(writes={OPTIMIZER + "min_lr_ratio": value["min_lr_rate"]})
    return Becomes(not_yet="settings of a schedule other than min_lr_rate")


def _optimizer(value: object) -> Becomes:
    if str(value) in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        return Becomes(writes={OPTIMIZER + "optimizer": "adamw"})
    return (
        Becomes(writes={OPTIMIZER + "optimizer": "sgd"}) if value == "sgd" else Becomes(not_yet=f"optimizer {value!r}")
    )


def _checkpointing(value: object) -> Becomes:
    if not isinstance(value, dict) or set(value) - {"use_reentrant"}:
        return Becomes(needless="asks for nothing") if not value else Becomes(not_yet="other ways of recomputing")
    return Becomes(writes={"trainer.gradient_checkpointing_use_reentrant": value["use_reentrant"]})


def _resume(value: object) -> Becomes:
    if isinstance(value, str):
        return Becomes(refused="a checkpoint of TRL's cannot be resumed here: start from its model")
    return Becomes(writes={"trainer.resume_mode": "latest" if value else "none"})


def _model_arguments(value: Any) -> Becomes:
    """Convert arguments of `from_pretrained`; the dtype is set by trainer.bf16."""
    rest = set(value or {}) - {"torch_dtype", "dtype", "use_cache"}
    if rest == {"attn_implementation"} and value["attn_implementation"] in ("sdpa", "eager", "flash_attention_2"):
        return Becomes(writes={"trainer.attention": value["attn_implementation"]})
    return Becomes(not_yet=f"{', '.join(sorted(rest))} of a model") if rest else Becomes(needless="as trainer.bf16")


_GENERATION: dict[str, Entry] = {
    "num_generations": goes_to("generator.n_samples_per_prompt"),
    "num_generations_eval": goes_to("generator.eval_n_samples_per_prompt"),
    "max_completion_length": goes_to(SAMPLING + "max_generate_length"),
    "max_prompt_length": goes_to("trainer.max_prompt_length"),
    "temperature": goes_to(SAMPLING + "temperature", convert=number),
    "top_p": goes_to(SAMPLING + "top_p", convert=number),
    "top_k": goes_to(SAMPLING + "top_k", convert=lambda value: value or -1),
    "min_p": goes_to(SAMPLING + "min_p", convert=number),
    "repetition_penalty": goes_to(SAMPLING + "repetition_penalty", convert=number),
    "generation_kwargs": goes_to(SAMPLING + "additional_kwargs"),
    "cache_implementation": not_there(_CACHES),
    "use_transformers_continuous_batching": not_there("requests join and leave a running batch"),
    "use_transformers_paged": not_there("requests join and leave a running batch"),
    "transformers_continuous_batching_config": not_there("requests join and leave a running batch"),
    "ds3_gather_for_generation": not_there("engines hold whole weights"),
    "pad_to_multiple_of": not_there("samples are packed without padding"),
    "max_tool_calling_iterations": later("converting tools: they are environments here (docs/environments.md)"),
    "vllm_model_impl": only("vllm", does="vLLM's own", otherwise="vLLM with transformers' models"),
    "vllm_enable_sleep_mode": not_there("engines sleep where models take turns on GPUs"),
    "vllm_structured_outputs_regex": later("answers that match a pattern"),
    **{f"vllm_{name}": not_there("the run starts its engines") for name in (
        "server_base_url", "server_host", "server_port", "server_timeout", "group_port",
    )},
}  # fmt: skip

_OBJECTIVE: dict[str, Entry] = {
    "num_iterations": goes_to("trainer.update_epochs_per_batch"),
    "mask_truncated_completions": goes_to("generator.apply_overlong_filtering"),
    "reward_weights": only(None, [1.0], does="one reward counts", otherwise="weights of several reward functions"),
    "multi_objective_aggregation": only(
        "sum_then_normalize", does="there is one reward", otherwise="several rewards that are normalized apart"
    ),
    "sync_ref_model": only(False, does="off", otherwise="a reference that follows (trainer.update_ref_every_epoch)"),
    "ref_model_mixup_alpha": not_there("sync_ref_model says whether the reference follows"),
    "ref_model_sync_steps": not_there("sync_ref_model says whether the reference follows"),
    "top_entropy_quantile": only(1.0, 1, does="every token counts", otherwise="a loss of the most uncertain tokens"),
    "use_adaptive_entropy": only(False, does="off", otherwise="a weight of the entropy that adapts"),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        not_there("use_adaptive_entropy says whether they count"),
    ),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), not_there(_VESPO)),
    "off_policy_mask_threshold": later("masks of sequences with a bad advantage that the policy left"),
    "use_bias_correction_kl": only(False, does="off", otherwise="a divergence that is weighted by ratios"),
    "router_aux_loss_coef": later("a loss that balances experts", 0.0, 0.001),
    "disable_dropout": goes_to("trainer.policy.use_dropout", convert=lambda off: not off),
    "cast_lm_head_to_fp32": not_there("logits and log-probabilities are computed in float32"),
}

_OPTIMIZATION: dict[str, Entry] = {
    "learning_rate": goes_to(OPTIMIZER + "lr", convert=number),
    "lr_scheduler_type": _scheduler,
    "lr_scheduler_kwargs": _schedule_settings,
    "optim": _optimizer,
    "optim_args": later("further arguments of an optimizer"),
    "optim_target_modules": later("optimizers of low rank"),
    "weight_decay": goes_to(OPTIMIZER + "weight_decay", convert=number),
    "adam_beta1": goes_to(OPTIMIZER + "adam_betas.0", convert=number),
    "adam_beta2": goes_to(OPTIMIZER + "adam_betas.1", convert=number),
    "adam_epsilon": goes_to(OPTIMIZER + "adam_eps", convert=number),
    "max_grad_norm": goes_to(OPTIMIZER + "max_grad_norm", convert=number),
    "num_train_epochs": goes_to("trainer.epochs", convert=_whole_number),
    "label_smoothing_factor": only(0, 0.0, does="off", otherwise="label smoothing"),
    "neftune_noise_alpha": later("noise on embeddings"),
    "average_tokens_across_devices": not_there("a loss is averaged over all ranks"),
    "bf16": goes_to("trainer.bf16"),
    "fp16": lambda value: (
        Becomes(writes={"trainer.policy.fsdp_config.mixed_precision.param_dtype": "float16"})
        if value
        else Becomes(needless="off")
    ),
    "tf32": not_there("torch decides how float32 is multiplied"),
    "bf16_full_eval": not_there("engines compute in generator.inference_engine.model_dtype"),
    "fp16_full_eval": not_there("engines compute in generator.inference_engine.model_dtype"),
    "gradient_checkpointing": goes_to("trainer.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": _checkpointing,
    "torch_compile": goes_to("trainer.policy.use_torch_compile"),
    "torch_compile_backend": later("other backends of torch.compile"),
    "torch_compile_mode": later("other modes of torch.compile"),
    "use_liger_kernel": not_there(_KERNELS),
    "liger_kernel_config": not_there(_KERNELS),
    "use_cache": not_there(_CACHES),
    "torch_empty_cache_steps": not_there("memory is given back where models take turns on GPUs"),
    "auto_find_batch_size": only(
        False, does="off", otherwise="batch sizes by trial: see trainer.max_tokens_per_microbatch"
    ),
    "full_determinism": goes_to("trainer.deterministic"),
    "seed": goes_to("trainer.seed"),
    "data_seed": only(None, does="it follows from trainer.seed", otherwise="a seed for the order of prompts alone"),
    "use_cpu": lambda value: (
        Becomes(writes={"trainer.device": "cpu"}) if value else Becomes(needless="models compute on GPUs")
    ),
}

_RUN: dict[str, Entry] = {
    "output_dir": goes_to("trainer.run_path"),
    "run_name": goes_to("trainer.run_name"),
    "project": goes_to("trainer.project_name"),
    "save_total_limit": goes_to("trainer.max_ckpts_to_keep"),
    "save_only_model": only(False, does="checkpoints hold all", otherwise="checkpoints without the optimizer's state"),
    "resume_from_checkpoint": _resume,
    "eval_on_start": goes_to("trainer.eval_before_train"),
    "eval_delay": later("evaluations that begin later", 0),
    "load_best_model_at_end": only(False, does="off", otherwise="the best model at the end: trainer.ckpt_keep_best"),
    "metric_for_best_model": later("the best model by a metric: trainer.ckpt_best_metric"),
    "greater_is_better": later("the best model by a metric: trainer.ckpt_best_is"),
    "ignore_data_skip": only(False, does="a resumed run takes the next prompts", otherwise="prompts once more"),
    "enable_jit_checkpoint": not_there("a run that is told to stop saves its state"),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "prediction_loss_only"), not_there("other settings say what is done")
    ),
    **dict.fromkeys((
        "logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_completions", "log_multimodal",
        "num_completions_to_print", "log_unique_prompts", "log_on_each_node", "logging_nan_inf_filter", "log_level",
        "log_level_replica", "disable_tqdm", "include_num_input_tokens_seen", "include_for_metrics", "debug",
        "skip_memory_metrics", "batch_eval_metrics", "trackio_*",
    ), not_there(_LOGS)),
    **dict.fromkeys(("push_to_hub", "push_to_hub_*", "hub_*", "log_completions_hub_repo"), not_there(_HUB)),
    **dict.fromkeys((
        "dataloader_*", "remove_unused_columns", "label_names", "length_column_name", "dataset_streaming",
        "ignore_bias_buffers", "dataset_num_proc", "train_sampling_strategy", "accelerator_config",
    ), not_there(_LOADING)),
    **dict.fromkeys((
        "ddp_*", "fsdp", "fsdp_config", "deepspeed", "accelerate_config", "config_file", "local_rank",
        "save_on_each_node", "restore_callback_states_from_checkpoint",
    ), not_there(_SHARDED)),
    **dict.fromkeys((
        "per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
    ), not_there("trainer.eval_batch_size prompts are evaluated at a time; no result depends on it")),
    "parallelism_config": later("parallel sizes by accelerate: trainer.policy.context_parallel_size"),
    "shuffle_dataset": only(True, does="prompts are shuffled", otherwise="prompts in the order of their file"),
    "num_processes": not_there("trainer.placement follows from it"),
    "dataset_config": not_there("a part of dataset_name here"),
    "dataset_train_split": not_there("a part of dataset_name here"),
    "dataset_test_split": not_there("a part of dataset_name here"),
    "config": later("the arguments of another file: convert that, too"),
    "reward_model_name_or_path": later('a reward model: environment.env_class = "reward_model"'),
}  # fmt: skip

_MODEL: dict[str, Entry] = {
    "model_name_or_path": goes_to("trainer.policy.model.path"),
    "model_revision": only("main", None, does="the main revision", otherwise="a revision of a model"),
    "dtype": not_there("master weights are float32"),
    "torch_dtype": not_there("master weights are float32"),
    "trust_remote_code": only(False, does="no code of a model is run", otherwise="code of a model's repository"),
    "model_init_kwargs": _model_arguments,
    "use_peft": only(True, False, does="trainer.policy.model.lora.rank says it", otherwise="adapters"),
    "lora_task_type": only("CAUSAL_LM", does="a language model", otherwise="other tasks"),
    "lora_bias": only("none", does="biases stay", otherwise="biases that are trained"),
    "lora_modules_to_save": later("modules that are trained beside the adapters"),
    "lora_target_parameters": later("adapters of parameters that are no modules"),
    "use_rslora": only(False, does=_PEFT, otherwise="rank-stabilized LoRA"),
    "use_dora": only(False, does=_PEFT, otherwise="DoRA"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), only(False, does="off", otherwise="quantized weights")),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), not_there("no weights are quantized")
    ),
}

KEYS: dict[str, Entry] = _GENERATION | _OBJECTIVE | _OPTIMIZATION | _RUN | _MODEL
