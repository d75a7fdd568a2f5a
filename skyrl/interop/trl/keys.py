"""TRL's settings that convert independently: those of `GRPOConfig`, and of its base class `TrainingArguments`."""

from __future__ import annotations

from typing import Any

from skyrl.interop.conversions import (
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

_LOGS = "every step is logged, and its samples are saved in the run folder"
_HUB = "exports go to trainer.export_path; upload them with the Hugging Face CLI"
_LOADING = "rows are read and split into prompts once, before training"
_SHARDED = "models are sharded across ranks by trainer.strategy"
_KERNELS = "affects speed, not results; learners choose their own kernels"
_CACHES = "engines choose their own cache"
_PEFT = "adapters are plain LoRA"
_VESPO = "only used with loss_type = vespo, which is not implemented"
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
    return Becomes(writes={OPTIMIZER + "scheduler": name}) if name else Becomes(not_yet=f"schedule {value!r}")


def _schedule_settings(value: object) -> Becomes:
    if not value:
        return Becomes(needless="not set")
    if isinstance(value, dict) and set(value) <= {"min_lr_rate"}:
        return Becomes(writes={OPTIMIZER + "min_lr_ratio": value["min_lr_rate"]})
    return Becomes(not_yet="schedule settings other than min_lr_rate")


def _optimizer(value: object) -> Becomes:
    if str(value) in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        return Becomes(writes={OPTIMIZER + "optimizer": "adamw"})
    return (
        Becomes(writes={OPTIMIZER + "optimizer": "sgd"}) if value == "sgd" else Becomes(not_yet=f"optimizer {value!r}")
    )


def _checkpointing(value: object) -> Becomes:
    if not isinstance(value, dict) or set(value) - {"use_reentrant"}:
        return (
            Becomes(needless="not set")
            if not value
            else Becomes(not_yet="checkpointing settings other than use_reentrant")
        )
    return Becomes(writes={"trainer.gradient_checkpointing_use_reentrant": value["use_reentrant"]})


def _resume(value: object) -> Becomes:
    if isinstance(value, str):
        return Becomes(refused="TRL checkpoints cannot be resumed here: start from the checkpoint's model")
    return Becomes(writes={"trainer.resume_mode": "latest" if value else "none"})


def _model_arguments(value: Any) -> Becomes:
    """Convert arguments of `from_pretrained`; the dtype is set by trainer.bf16."""
    rest = set(value or {}) - {"torch_dtype", "dtype", "use_cache"}
    if rest == {"attn_implementation"} and value["attn_implementation"] in ("sdpa", "eager", "flash_attention_2"):
        return Becomes(writes={"trainer.attention": value["attn_implementation"]})
    return (
        Becomes(not_yet=f"model arguments {', '.join(sorted(rest))}")
        if rest
        else Becomes(needless="set by trainer.bf16")
    )


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
    "use_transformers_continuous_batching": not_there("engines use continuous batching"),
    "use_transformers_paged": not_there("engines use continuous batching"),
    "transformers_continuous_batching_config": not_there("engines use continuous batching"),
    "ds3_gather_for_generation": not_there("engines hold full weights"),
    "pad_to_multiple_of": not_there("samples are packed without padding"),
    "max_tool_calling_iterations": later("converting tools, which are environments here (docs/environments.md)"),
    "vllm_model_impl": only("vllm", does="vLLM's own models are used", otherwise="transformers models in vLLM"),
    "vllm_enable_sleep_mode": not_there("engines sleep when models take turns on GPUs"),
    "vllm_structured_outputs_regex": later("structured outputs that match a regular expression"),
    **{f"vllm_{name}": not_there("the run starts its own engines") for name in (
        "server_base_url", "server_host", "server_port", "server_timeout", "group_port",
    )},
}  # fmt: skip

_OBJECTIVE: dict[str, Entry] = {
    "num_iterations": goes_to("trainer.update_epochs_per_batch"),
    "mask_truncated_completions": goes_to("generator.apply_overlong_filtering"),
    "reward_weights": only(
        None, [1.0], does="there is one reward function", otherwise="weights of several reward functions"
    ),
    "multi_objective_aggregation": only(
        "sum_then_normalize", does="there is one reward function", otherwise="normalizing several rewards separately"
    ),
    "sync_ref_model": only(
        False, does="off", otherwise="syncing the reference model; see trainer.update_ref_every_epoch"
    ),
    "ref_model_mixup_alpha": not_there("only used with sync_ref_model, which is not implemented"),
    "ref_model_sync_steps": not_there("only used with sync_ref_model, which is not implemented"),
    "top_entropy_quantile": only(
        1.0, 1, does="the loss covers all tokens", otherwise="a loss on high-entropy tokens only"
    ),
    "use_adaptive_entropy": only(False, does="off", otherwise="an adaptive entropy coefficient"),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        not_there("only used with use_adaptive_entropy, which is not implemented"),
    ),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), not_there(_VESPO)),
    "off_policy_mask_threshold": later("masking off-policy sequences with negative advantages"),
    "use_bias_correction_kl": only(False, does="off", otherwise="a KL divergence weighted by importance ratios"),
    "router_aux_loss_coef": later("a load-balancing loss for experts", 0.0, 0.001),
    "disable_dropout": goes_to("trainer.policy.use_dropout", convert=lambda off: not off),
    "cast_lm_head_to_fp32": goes_to("trainer.fp32_lm_head"),
}

_OPTIMIZATION: dict[str, Entry] = {
    "learning_rate": goes_to(OPTIMIZER + "lr", convert=number),
    "lr_scheduler_type": _scheduler,
    "lr_scheduler_kwargs": _schedule_settings,
    "optim": _optimizer,
    "optim_args": later("additional optimizer arguments"),
    "optim_target_modules": later("low-rank optimizers"),
    "weight_decay": goes_to(OPTIMIZER + "weight_decay", convert=number),
    "adam_beta1": goes_to(OPTIMIZER + "adam_betas.0", convert=number),
    "adam_beta2": goes_to(OPTIMIZER + "adam_betas.1", convert=number),
    "adam_epsilon": goes_to(OPTIMIZER + "adam_eps", convert=number),
    "max_grad_norm": goes_to(OPTIMIZER + "max_grad_norm", convert=number),
    "num_train_epochs": goes_to("trainer.epochs", convert=_whole_number),
    "label_smoothing_factor": only(0, 0.0, does="off", otherwise="label smoothing"),
    "neftune_noise_alpha": later("noise on embeddings (NEFTune)"),
    "average_tokens_across_devices": not_there("the loss is always averaged over all ranks"),
    "bf16": goes_to("trainer.bf16"),
    "fp16": lambda value: (
        Becomes(writes={"trainer.policy.fsdp_config.mixed_precision.param_dtype": "float16"})
        if value
        else Becomes(needless="off")
    ),
    "tf32": not_there("torch's default precision of float32 matrix products is used"),
    "bf16_full_eval": not_there("set by generator.inference_engine.model_dtype"),
    "fp16_full_eval": not_there("set by generator.inference_engine.model_dtype"),
    "gradient_checkpointing": goes_to("trainer.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": _checkpointing,
    "torch_compile": goes_to("trainer.policy.use_torch_compile"),
    "torch_compile_backend": later("other torch.compile backends"),
    "torch_compile_mode": later("other torch.compile modes"),
    "use_liger_kernel": goes_to("trainer.use_liger_kernel"),
    "liger_kernel_config": not_there(_KERNELS),
    "use_cache": not_there(_CACHES),
    "torch_empty_cache_steps": not_there("memory is freed when models take turns on GPUs"),
    "auto_find_batch_size": only(
        False, does="off", otherwise="finding batch sizes by trial; see trainer.max_tokens_per_microbatch"
    ),
    "full_determinism": goes_to("trainer.deterministic"),
    "seed": goes_to("trainer.seed"),
    "data_seed": only(None, does="derived from trainer.seed", otherwise="a separate seed for the order of prompts"),
    "use_cpu": lambda value: (
        Becomes(writes={"trainer.device": "cpu"}) if value else Becomes(needless="models run on GPUs")
    ),
}

_RUN: dict[str, Entry] = {
    "output_dir": goes_to("trainer.run_path"),
    "run_name": goes_to("trainer.run_name"),
    "project": goes_to("trainer.project_name"),
    "save_total_limit": goes_to("trainer.max_ckpts_to_keep"),
    "save_only_model": only(False, does="checkpoints are complete", otherwise="checkpoints without optimizer state"),
    "resume_from_checkpoint": _resume,
    "eval_on_start": goes_to("trainer.eval_before_train"),
    "eval_delay": later("delayed evaluation", 0),
    "load_best_model_at_end": only(
        False, does="off", otherwise="loading the best model at the end; see trainer.ckpt_keep_best"
    ),
    "metric_for_best_model": later("choosing the best model by a metric; see trainer.ckpt_best_metric"),
    "greater_is_better": later("choosing the best model by a metric; see trainer.ckpt_best_is"),
    "ignore_data_skip": only(
        False, does="a resumed run continues with the next prompts", otherwise="repeating prompts in a resumed run"
    ),
    "enable_jit_checkpoint": not_there("a run that is asked to stop always saves a checkpoint"),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "prediction_loss_only"), not_there("set by other settings")
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
    ), not_there("set by trainer.eval_batch_size; it does not affect results")),
    "parallelism_config": later("parallel sizes from accelerate; see trainer.policy.context_parallel_size"),
    "shuffle_dataset": goes_to("data.shuffle"),
    "num_processes": not_there("trainer.placement is derived from it"),
    "dataset_config": not_there("part of the data source: NAME:CONFIGURATION:SPLIT"),
    "dataset_train_split": not_there("part of the data source: NAME:CONFIGURATION:SPLIT"),
    "dataset_test_split": not_there("part of the data source: NAME:CONFIGURATION:SPLIT"),
    "config": later("arguments in another file; convert that file, too"),
    "reward_model_name_or_path": later('converting reward models; set environment.env_class = "reward_model"'),
}  # fmt: skip

_MODEL: dict[str, Entry] = {
    "model_name_or_path": goes_to("trainer.policy.model.path"),
    "model_revision": only("main", None, does="the default revision", otherwise="other revisions of a model"),
    "dtype": not_there("master weights are always float32"),
    "torch_dtype": not_there("master weights are always float32"),
    "trust_remote_code": only(
        False, does="code from a model's repository is never run", otherwise="running code from a model's repository"
    ),
    "model_init_kwargs": _model_arguments,
    "use_peft": only(True, False, does="set by trainer.policy.model.lora.rank", otherwise="adapters"),
    "lora_task_type": only("CAUSAL_LM", does="models are causal language models", otherwise="other task types"),
    "lora_bias": only("none", does="biases are not trained", otherwise="training biases"),
    "lora_modules_to_save": later("training full modules in addition to adapters"),
    "lora_target_parameters": later("adapters of parameters that are not modules"),
    "use_rslora": only(False, does=_PEFT, otherwise="rank-stabilized LoRA"),
    "use_dora": only(False, does=_PEFT, otherwise="DoRA"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), only(False, does="off", otherwise="quantized weights")),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        not_there("only used with quantized weights, which are refused"),
    ),
}

KEYS: dict[str, Entry] = _GENERATION | _OBJECTIVE | _OPTIMIZATION | _RUN | _MODEL
