"""Leaves that act in no run of their kind and are reported wherever they are written, with the reason."""

from __future__ import annotations

FROZEN = {"ref": "reference", "teacher": "teacher"}
_SAVES = "DeepSpeed saves no model: checkpoints and exports gather it otherwise"
_CLIPPING = "`optimizer_config.max_grad_norm` clips under every strategy"
_FROZEN = {model: f"a {title} has neither gradients nor an optimizer" for model, title in FROZEN.items()}
_ZERO = "deepspeed_config.zero_optimization."

_OF_GRADIENTS = (
    "fsdp_config.mixed_precision.reduce_dtype",
    "deepspeed_config.communication_data_type",
    "deepspeed_config.prescale_gradients",
    "deepspeed_config.wall_clock_breakdown",
    f"{_ZERO}zero_hpz_partition_size",
    f"{_ZERO}zero_quantized_gradients",
    f"{_ZERO}contiguous_gradients",
    f"{_ZERO}round_robin_gradients",
    f"{_ZERO}reduce_bucket_size",
    f"{_ZERO}allgather_bucket_size",
    f"{_ZERO}sub_group_size",
    *(f"{_ZERO}offload_optimizer.{name}" for name in ("device", "pin_memory", "nvme_path")),
)
_MEGATRON = "megatron_config."
_OF_MEGATRONS_LEARNING = (
    *(
        f"ddp_config.{name}"
        for name in ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective")
    ),
    *(f"torch_profiler_config.{name}" for name in ("enable", "ranks", "save_path")),
    "optimizer_config_kwargs",
    "empty_cuda_cache",
    "lora_config.lora_type",
)
_RL_MODELS = ("policy", "critic", *FROZEN)
_MODELS = (
    *(("rl", f"trainer.{model}.") for model in _RL_MODELS),
    ("sft", ""),
    ("reward_model", ""),
    ("preference", ""),
)

NEVER: dict[tuple[str, str], str] = {
    **{
        (kind, f"{table}{field}"): reason
        for kind, table in _MODELS
        for field, reason in (
            (f"{_ZERO}stage3_gather_16bit_weights_on_model_save", _SAVES),
            ("deepspeed_config.gradient_clipping", _CLIPPING),
        )
    },
    **{
        ("rl", f"trainer.{model}.{field}"): reason
        for model, reason in _FROZEN.items()
        for field in (*_OF_GRADIENTS, *(_MEGATRON + name for name in _OF_MEGATRONS_LEARNING), "model.lora.dropout")
    },
    **{
        ("rl", f"trainer.{model}.model.lora.init_method"): f"a {title} has a stored adapter or none"
        for model, title in FROZEN.items()
    },
    **{
        (kind, field): reason
        for kind in ("sft", "reward_model", "preference")
        for field, reason in (
            ("optimizer_config.offload_after_step", "no engines share the device"),
            ("optimizer_config.schedule_unit", "one batch is one optimizer step"),
            ("faults.max_skipped_steps", "`optimizer_config.max_skipped_updates` counts what is left out"),
            ("faults.max_roll_backs", "a step that goes wrong would go wrong again on the same rows"),
        )
    },
    **dict.fromkeys(
        (
            *(("rl", f"trainer.{model}.model.lora.lora_sync_path") for model in _RL_MODELS if model != "policy"),
            ("sft", "model.lora.lora_sync_path"),
            ("reward_model", "model.lora.lora_sync_path"),
            ("preference", "model.lora.lora_sync_path"),
        ),
        "engines sample from the policy alone",
    ),
    **dict.fromkeys(
        ((kind, f"{table}{_MEGATRON}dist_ckpt_optim_fully_reshardable") for kind, table in _MODELS),
        "every checkpoint can be loaded by any number of ranks",
    ),
    ("preference", "too_long"): "a pair whose answers are cut is another pair, so that longer ones are left out",
    ("reward_model", "too_long"): "a score is read at the end of a chat, so that longer pairs are left out",
}
"""(kind, path) -> reason."""
