"""Settings that AReaL gained by May 2026: vLLM's options, adapters, rejection sampling, per-engine backends."""

from __future__ import annotations

from skyrl.interop.conversions import (
    ALGORITHM,
    ENGINE,
    Becomes,
    Entry,
    goes_to,
    later,
    not_there,
    number,
    only,
)

_ADAPTERS = "adapter transfer and naming are derived from trainer.policy.model.lora"
_VLLM = ENGINE + "engine_init_kwargs."

_CAP_MODES = {"token_mask": "mask", "token_truncate": "clamp"}


def _cap_mode(mode: object) -> Becomes:
    """Convert the cap mode, which AReaL had early in 2026, before `rejection_sampling`."""
    if isinstance(mode, str) and mode in _CAP_MODES:
        return Becomes(writes={ALGORITHM + "decoupled.cap_mode": _CAP_MODES[mode]})
    return Becomes(
        not_yet="the decoupled loss without importance weights"
        if mode == "disabled"
        else "sequence-level importance weights"
    )


KEYS_2026: dict[str, Entry] = {
    # vLLM
    "vllm.model": not_there("engines always serve the policy"),
    "vllm.seed": not_there("sampling seeds are derived from trainer.seed"),
    "vllm.skip_tokenizer_init": not_there("engines receive token IDs"),
    "vllm.enforce_eager": goes_to(ENGINE + "enforce_eager"),
    "vllm.dtype": goes_to(ENGINE + "model_dtype"),
    "vllm.distributed_executor_backend": goes_to(ENGINE + "distributed_executor_backend"),
    "vllm.max_num_seqs": goes_to(ENGINE + "max_num_seqs"),
    "vllm.gpu_memory_utilization": goes_to(ENGINE + "gpu_memory_utilization", convert=number),
    "vllm.no_enable_chunked_prefill": goes_to(ENGINE + "enable_chunked_prefill", convert=lambda off: not off),
    "vllm.no_enable_prefix_caching": goes_to(ENGINE + "enable_prefix_caching", convert=lambda off: not off),
    **{f"vllm.{name}": goes_to(_VLLM + name) for name in (
        "max_model_len", "block_size", "cpu_offload_gb", "disable_sliding_window",
    )},
    "vllm.enable_sleep_mode": not_there("engines sleep when models take turns on GPUs"),
    "vllm.worker_extension_cls": not_there("weight transfer needs no worker extension"),
    "vllm.uvicorn_log_level": not_there("each engine has a log file under trainer.log_path"),
    "vllm.max_lora_rank": not_there(_ADAPTERS),
    "vllm.max_loras": not_there(_ADAPTERS),
    "vllm.lora_modules": not_there(_ADAPTERS),
    "vllm.enable_lora": not_there(_ADAPTERS),
    # adapters
    # the objective
    "actor.m2_threshold": later("M2PO, which limits the second moment of the ratios"),
    "actor.behave_imp_weight_cap": goes_to(ALGORITHM + "decoupled.behav_imp_weight_cap", convert=number),
    "actor.behave_imp_weight_mode": _cap_mode,
    "actor.rejection_sampling": later("a value for a whole table; set its fields instead"),
    "actor.rejection_sampling.level": only("token", does="rejection is per token", otherwise="rejection per sequence"),
    "actor.rejection_sampling.action": goes_to(ALGORITHM + "decoupled.cap_mode"),
    "actor.rejection_sampling.metric": only(
        "ratio", does="limits apply to ratios", otherwise="limits on KL divergence"
    ),
    "actor.rejection_sampling.agg": not_there("rejection is per token, so nothing is aggregated"),
    "actor.rejection_sampling.upper": goes_to(ALGORITHM + "decoupled.behav_imp_weight_cap", convert=number),
    "actor.rejection_sampling.lower": later("a lower limit on ratios in the decoupled loss"),
    "actor.enable_tree_training": later("tree training over shared prefixes", False),
    "teacher.*": later("on-policy distillation from a teacher"),
    "dynamic_bs": later("dynamic batches, which end once enough samples were seen", False),
    "ref.optimizer.*": not_there("the reference model has no optimizer"),
    # weights
    "actor.weight_update_mode": lambda value: (
        Becomes(writes={ENGINE + "weight_sync_backend": "disk"})
        if value == "disk"
        else Becomes(needless="weights are transferred from GPU to GPU")
    ),
    # places, traces, trackers
    "*.scheduling_spec[[]*": later("scheduling settings beyond those in docs/launching.md"),
    "rollout.tokenizer_path": not_there("the policy's tokenizer is used"),
    "stats_logger.trackio.*": later("the Trackio tracker", "disabled"),
}  # fmt: skip
"""Keys in the form of `areal_keys.KEYS`, looked up before them."""

LORA_KEYS = tuple(
    f"{model}.{name}" for model in ("actor", "critic", "ref") for name in (
        "peft_type", "target_modules", "lora_rank", "lora_alpha",
    )
)  # fmt: skip
"""Settings of adapters, which have an effect only with `use_lora` of their model."""
