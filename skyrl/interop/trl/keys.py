"""TRL's settings that convert independently: those of `GRPOConfig`, `RLOOConfig` and their base `TrainingArguments`, of
TRL 1.16, 0.27 and 0.18 and of open-r1's recipes.
"""

from __future__ import annotations

from typing import Any

from skyrl.interop.translation import (
    ENGINE,
    OPTIMIZER,
    SAMPLING,
    SHAPING,
    Entry,
    Translation,
    fixed,
    is_off,
    maps_to,
    missing,
    number,
    numeric,
    real,
    redundant,
    refused,
    table,
    unsupported,
    when_on,
)
from skyrl.interop.trl.dependent import SAMPLED
from skyrl.tree.types import display_value

_HUB = "exports go to trainer.export_path; upload them with the Hugging Face CLI"
_KERNELS = "affects speed, not results; learners choose their own kernels"
_CACHES = "engines choose their own cache"
_PEFT = "adapters are plain LoRA"
_LORA = "trainer.policy.model.lora."
_OF_EXPERTS = (
    "acts only on a mixture of experts, with the coefficient of its own: then set trainer.policy.router_aux_loss_coef"
)
_SCHEDULES = (
    "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
)  # fmt: skip


def _whole_number(value: object) -> Any:
    """A whole float as an int: `num_train_epochs = 3.0` becomes 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _scheduler(value: object) -> Translation:
    name = str(value).removeprefix("SchedulerType.").lower()
    if name not in _SCHEDULES:
        return unsupported(f"schedule {display_value(value)}")
    return Translation(writes={OPTIMIZER + "scheduler": name})


def _schedule_settings(value: object) -> Translation:
    if not value:
        return redundant("not set")
    if {*table(value)} == {"min_lr_rate"}:
        return Translation(writes={OPTIMIZER + "min_lr_ratio": table(value)["min_lr_rate"]})
    return unsupported("schedule settings other than min_lr_rate")


def _optimizer(value: object) -> Translation:
    names = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "sgd": "sgd"}
    name = names.get(str(value))
    return (
        Translation(writes={OPTIMIZER + "optimizer": name})
        if name
        else unsupported(f"optimizer {display_value(value)}")
    )


def _checkpointing(value: object) -> Translation:
    if not value:
        return redundant("not set")
    if {*table(value)} != {"use_reentrant"}:
        return unsupported("checkpointing settings other than use_reentrant")
    return Translation(writes={"trainer.gradient_checkpointing_use_reentrant": table(value)["use_reentrant"]})


def resume(path: str, never: str) -> Entry:
    """Entry of the switch to resume, with the value at our path for runs that never do."""
    return lambda value: (
        refused("TRL checkpoints cannot be resumed here: start from the checkpoint's model")
        if isinstance(value, str)
        else Translation(writes={path: "latest" if value else never})
    )


def _model_arguments(value: object) -> Translation:
    """Convert arguments of `from_pretrained`; the dtype is set by trainer.bf16."""
    arguments = table(value)
    rest = {*arguments} - {"torch_dtype", "dtype", "use_cache"}
    if rest == {"attn_implementation"} and arguments["attn_implementation"] in ("sdpa", "eager", "flash_attention_2"):
        return Translation(writes={"trainer.attention": arguments["attn_implementation"]})
    if rest:
        return unsupported(f"model arguments {', '.join(sorted(map(str, rest)))}")
    return redundant("set by trainer.bf16")


def _reward_bounds(value: object) -> Translation:
    """Convert the bounds of RLOO's rewards, which are one number here."""
    if value is None:
        return redundant("not set")
    low, high = (real(item) for item in value) if isinstance(value, list | tuple) and len(value) == 2 else (1.0, 1.0)
    if low != -high or high <= 0:
        return unsupported("bounds of rewards other than -x and x")
    return Translation(writes={SHAPING + "clip": high})


_GENERATION: dict[str, Entry] = {
    "num_generations": "generator.n_samples_per_prompt",
    "num_generations_eval": "generator.eval_n_samples_per_prompt",
    "max_completion_length": SAMPLING + "max_generate_length",
    "max_prompt_length": "trainer.max_prompt_length",
    **SAMPLED,
    "cache_implementation": redundant(_CACHES),
    "use_transformers_continuous_batching": redundant("engines use continuous batching"),
    "use_transformers_paged": redundant("engines use continuous batching"),
    "transformers_continuous_batching_config": redundant("engines use continuous batching"),
    "ds3_gather_for_generation": redundant("engines hold full weights"),
    "pad_to_multiple_of": redundant("samples are packed without padding"),
    "max_tool_calling_iterations": missing("converting tools, which are environments here (docs/tools.md)"),
    "vllm_model_impl": fixed("vllm", does="vLLM's own models are used", otherwise="transformers models in vLLM"),
    "vllm_mode": fixed(
        "colocate",
        does="engines share the learners' GPUs",
        otherwise="servers of `trl vllm-serve`; the run starts its own engines or uses vLLM servers (docs/servers.md)",
    ),
    "vllm_gpu_memory_utilization": numeric(ENGINE + "gpu_memory_utilization"),
    "vllm_tensor_parallel_size": numeric(ENGINE + "tensor_parallel_size"),
    "vllm_max_model_length": numeric(ENGINE + "engine_init_kwargs.max_model_len"),
    "vllm_enable_sleep_mode": redundant("engines sleep when models take turns on GPUs"),
    "vllm_structured_outputs_regex": missing("structured outputs that match a regular expression"),
    **{f"vllm_{name}": redundant("the run starts its own engines") for name in (
        "server_base_url", "server_host", "server_port", "server_timeout", "group_port",
    )},
    "vllm_guided_decoding_regex": missing("structured outputs that match a regular expression"),
    "vllm_device": redundant("engines share the learners' GPUs"),
    "vllm_dtype": redundant("set by generator.inference_engine.model_dtype"),
    "vllm_enable_prefix_caching": "generator.inference_engine.enable_prefix_caching",
}  # fmt: skip

_OBJECTIVE: dict[str, Entry] = {
    "num_iterations": "trainer.update_epochs_per_batch",
    "mask_truncated_completions": "generator.apply_overlong_filtering",
    "multi_objective_aggregation": fixed(
        "sum_then_normalize", does="rewards are added first", otherwise="normalizing several rewards separately"
    ),
    "sync_ref_model": fixed(
        False, does="off", otherwise="syncing the reference model; see trainer.update_ref_every_epoch"
    ),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), unsupported("syncing the reference model")),
    "top_entropy_quantile": fixed(
        1.0, 1, does="the loss covers all tokens", otherwise="a loss on high-entropy tokens only"
    ),
    "use_adaptive_entropy": fixed(False, does="off", otherwise="an adaptive entropy coefficient"),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        unsupported("an adaptive entropy coefficient"),
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), unsupported("the loss vespo")
    ),
    "off_policy_mask_threshold": missing("masking off-policy sequences with negative advantages"),
    "use_bias_correction_kl": fixed(False, does="off", otherwise="a KL divergence weighted by importance ratios"),
    "router_aux_loss_coef": lambda value: (
        Translation(writes={"trainer.policy.router_aux_loss_coef": number(value)})
        if value is not None
        else redundant(_OF_EXPERTS)
    ),
    "normalize_advantages": fixed(
        False, does="off", otherwise="normalizing advantages over answers; advantage_norm weighs them by tokens"
    ),
    "reward_clip_range": _reward_bounds,
    "cast_lm_head_to_fp32": "trainer.fp32_lm_head",
}

_OPTIMIZATION: dict[str, Entry] = {
    "learning_rate": numeric(OPTIMIZER + "lr"),
    "lr_scheduler_type": _scheduler,
    "lr_scheduler_kwargs": _schedule_settings,
    "optim": _optimizer,
    "optim_args": missing("additional optimizer arguments"),
    "optim_target_modules": missing("low-rank optimizers"),
    "adafactor": fixed(False, does="off", otherwise="the optimizer Adafactor"),
    "weight_decay": numeric(OPTIMIZER + "weight_decay"),
    "adam_beta1": numeric(OPTIMIZER + "adam_betas.0"),
    "adam_beta2": numeric(OPTIMIZER + "adam_betas.1"),
    "adam_epsilon": numeric(OPTIMIZER + "adam_eps"),
    "max_grad_norm": numeric(OPTIMIZER + "max_grad_norm"),
    "num_train_epochs": maps_to("trainer.epochs", convert=_whole_number),
    "label_smoothing_factor": fixed(0, 0.0, does="off", otherwise="label smoothing"),
    "neftune_noise_alpha": missing("noise on embeddings (NEFTune)"),
    "average_tokens_across_devices": redundant("the loss is always averaged over all ranks"),
    "fp16": when_on("trainer.policy.fsdp_config.mixed_precision.param_dtype", "float16"),
    "tf32": redundant("torch's default precision of float32 matrix products is used"),
    "bf16_full_eval": redundant("set by generator.inference_engine.model_dtype"),
    "fp16_full_eval": redundant("set by generator.inference_engine.model_dtype"),
    "gradient_checkpointing": "trainer.gradient_checkpointing",
    "gradient_checkpointing_kwargs": _checkpointing,
    "gradient_checkpointing_use_reentrant": "trainer.gradient_checkpointing_use_reentrant",
    "torch_compile": "trainer.policy.use_torch_compile",
    "torch_compile_backend": missing("other torch.compile backends"),
    "torch_compile_mode": missing("other torch.compile modes"),
    "use_liger_kernel": "trainer.use_liger_kernel",
    "liger_kernel_config": redundant(_KERNELS),
    "use_cache": redundant(_CACHES),
    "torch_empty_cache_steps": redundant("memory is freed when models take turns on GPUs"),
    "auto_find_batch_size": fixed(
        False, does="off", otherwise="finding batch sizes by trial; see trainer.max_tokens_per_microbatch"
    ),
    "full_determinism": "trainer.deterministic",
    "seed": "trainer.seed",
    "data_seed": fixed(None, does="derived from trainer.seed", otherwise="a separate seed for the order of prompts"),
    **dict.fromkeys(
        ("use_cpu", "no_cuda"),
        lambda value: Translation(writes={"trainer.device": "cpu"}) if value else redundant("models run on GPUs"),
    ),
    **dict.fromkeys(("use_mps_device", "use_ipex", "jit_mode_eval"), fixed(False, does="off", otherwise="this device")),
    "torchdynamo": missing("other torch.compile backends"),
    **dict.fromkeys(
        ("per_gpu_train_batch_size", "per_gpu_eval_batch_size"),
        missing("an older name of a batch size; write per_device_train_batch_size"),
    ),
    "use_liger_loss": redundant(_KERNELS),
}

_RUN: dict[str, Entry] = {
    "output_dir": "trainer.run_path",
    "overwrite_output_dir": redundant("trainer.resume_mode decides about a run that exists"),
    "wandb_project": "trainer.project_name",
    "wandb_entity": "trainer.trackers.wandb.entity",
    "wandb_run_group": "trainer.trackers.group",
    "benchmarks": missing("benchmarks after the training; `skyrl eval` evaluates the model", []),
    "callbacks": lambda value: (
        redundant("exports go to trainer.export_path")
        if is_off(value) or value == ["push_to_hub_revision"]
        else unsupported("callbacks of the program")
    ),
    "env": missing("variables of the environment in the file; export them before `skyrl run`", {}),
    "run_name": "trainer.run_name",
    "project": "trainer.project_name",
    "save_total_limit": "trainer.max_ckpts_to_keep",
    "save_only_model": fixed(False, does="checkpoints are complete", otherwise="checkpoints without optimizer state"),
    "resume_from_checkpoint": resume("trainer.resume_mode", "none"),
    "eval_on_start": "trainer.eval_before_train",
    "eval_delay": missing("delayed evaluation", 0),
    "load_best_model_at_end": fixed(
        False, does="off", otherwise="loading the best model at the end; see trainer.ckpt_keep_best"
    ),
    "metric_for_best_model": missing("choosing the best model by a metric; see trainer.ckpt_best_metric"),
    "greater_is_better": missing("choosing the best model by a metric; see trainer.ckpt_best_is"),
    "ignore_data_skip": fixed(
        False, does="a resumed run continues with the next prompts", otherwise="repeating prompts in a resumed run"
    ),
    "enable_jit_checkpoint": redundant("a run that is asked to stop always saves a checkpoint"),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "prediction_loss_only"), redundant("set by other settings")
    ),
    **dict.fromkeys((
        "logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_completions", "log_multimodal",
        "num_completions_to_print", "log_unique_prompts", "log_on_each_node", "logging_nan_inf_filter", "log_level",
        "log_level_replica", "disable_tqdm", "include_num_input_tokens_seen", "include_for_metrics", "debug",
        "skip_memory_metrics", "batch_eval_metrics", "trackio_*", "wandb_log_unique_prompts",
        "include_inputs_for_metrics", "include_tokens_per_second",
    ), redundant("every step is logged, and its samples are saved in the run folder")),
    **dict.fromkeys(
        ("push_to_hub", "push_to_hub_*", "hub_*", "log_completions_hub_repo", "overwrite_hub_revision"), redundant(_HUB)
    ),
    **dict.fromkeys((
        "dataloader_*", "remove_unused_columns", "label_names", "length_column_name", "dataset_streaming",
        "ignore_bias_buffers", "dataset_num_proc", "train_sampling_strategy", "accelerator_config", "streaming",
        "group_by_length",
    ), redundant("rows are read and split into prompts once, before training")),
    **dict.fromkeys((
        "tpu_*", "fp16_backend", "fp16_opt_level", "half_precision_backend", "mp_parameters", "past_index", "ray_scope",
        "use_legacy_prediction_loop", "save_safetensors",
    ), redundant("read by no trainer of TRL, or only by older versions for other hardware")),
    **dict.fromkeys((
        "ddp_*", "fsdp", "fsdp_*", "deepspeed", "accelerate_config", "config_file", "local_rank",
        "save_on_each_node",
    ), redundant("models are sharded across ranks by trainer.strategy")),
    "restore_callback_states_from_checkpoint": redundant("there are no callbacks of transformers, so none has a state"),
    **dict.fromkeys((
        "per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
    ), redundant("set by trainer.eval_batch_size; it does not affect results")),
    "parallelism_config": missing("parallel sizes from accelerate; see trainer.policy.context_parallel_size"),
    "shuffle_dataset": "data.shuffle",
    "num_processes": redundant("trainer.placement is derived from it"),
    "dataset_config": redundant("part of the data source: NAME:CONFIGURATION:SPLIT"),
    "dataset_train_split": redundant("part of the data source: NAME:CONFIGURATION:SPLIT"),
    "dataset_test_split": redundant("part of the data source: NAME:CONFIGURATION:SPLIT"),
    "config": missing("arguments in another file; convert that file, too"),
    "reward_model_name_or_path": missing('converting reward models; set environment.env_class = "reward_model"'),
}  # fmt: skip

_MODEL: dict[str, Entry] = {
    "model_name_or_path": "trainer.policy.model.path",
    "model_revision": fixed("main", None, does="the default revision", otherwise="other revisions of a model"),
    "dtype": redundant("master weights are always float32"),
    "torch_dtype": redundant("master weights are always float32"),
    "trust_remote_code": fixed(
        False, does="code from a model's repository is never run", otherwise="running code from a model's repository"
    ),
    "model_init_kwargs": _model_arguments,
    "use_peft": fixed(True, False, does="set by trainer.policy.model.lora.rank", otherwise="adapters"),
    "lora_r": _LORA + "rank",
    "lora_alpha": _LORA + "alpha",
    "lora_dropout": _LORA + "dropout",
    "lora_target_modules": maps_to(
        _LORA + "target_modules", convert=lambda names: "all-linear" if names == ["all-linear"] else names
    ),
    "lora_exclude_modules": _LORA + "exclude_modules",
    "lora_task_type": fixed("CAUSAL_LM", does="models are causal language models", otherwise="other task types"),
    "lora_bias": fixed("none", does="biases are not trained", otherwise="training biases"),
    "lora_modules_to_save": missing("training full modules in addition to adapters"),
    "lora_target_parameters": missing("adapters of parameters that are not modules"),
    "use_rslora": fixed(False, does=_PEFT, otherwise="rank-stabilized LoRA"),
    "use_dora": fixed(False, does=_PEFT, otherwise="DoRA"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), fixed(False, does="off", otherwise="quantized weights")),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        redundant("only used with quantized weights, which are refused"),
    ),
}

SHARED: dict[str, Entry] = _OPTIMIZATION | _RUN | _MODEL
"""Settings that every kind of run has."""

_RECIPES: dict[str, Entry] = {
    "dataset_prompt_column": "data.prompt_column",
    "system_prompt": missing("a system prompt for all rows; write it into the prompts of the rows"),
    "chat_template": missing("a template in the settings; write it to a file, and set generator.chat_template"),
    **dict.fromkeys((
        "cosine_*", "repetition_*", "code_*", "parallel_code_exec_per_proc", "e2b_router_url", "morph_router_url",
        "ioi_provider", "max_completion_len", "soft_punish_cache",
    ), redundant("only read by rewards of open-r1 that are refused by their names")),
}  # fmt: skip
"""Settings that open-r1 adds to those of TRL."""

KEYS: dict[str, Entry] = _GENERATION | _OBJECTIVE | SHARED | _RECIPES
