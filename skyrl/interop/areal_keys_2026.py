"""Settings that AReaL gained by May 2026: vLLM's options, adapters, rejection sampling, per-engine backends."""

from __future__ import annotations

from skyrl.interop.areal_values import (
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

_ADAPTERS = "whether an adapter travels alone, and under which name, follows from trainer.policy.model.lora"
_VLLM = ENGINE + "engine_init_kwargs."

_CAP_MODES = {"token_mask": "mask", "token_truncate": "clamp"}


def _cap_mode(mode: object) -> Becomes:
    """Convert the cap mode, which AReaL had early in 2026, before `rejection_sampling`."""
    if isinstance(mode, str) and mode in _CAP_MODES:
        return Becomes(writes={ALGORITHM + "decoupled.cap_mode": _CAP_MODES[mode]})
    return Becomes(not_yet="the decoupled loss without its weight" if mode == "disabled" else "judging whole sequences")


KEYS_2026: dict[str, Entry] = {
    # vLLM
    "vllm.model": not_there("the engines serve the policy"),
    "vllm.seed": not_there("seeds of samples follow from trainer.seed"),
    "vllm.skip_tokenizer_init": not_there("engines are given tokens"),
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
    "vllm.enable_sleep_mode": not_there("engines sleep where models take turns"),
    "vllm.worker_extension_cls": not_there("weights arrive through the engines' own transports"),
    "vllm.uvicorn_log_level": not_there("every engine has a file below trainer.log_path"),
    "vllm.max_lora_rank": not_there(_ADAPTERS),
    "vllm.max_loras": not_there(_ADAPTERS),
    "vllm.lora_modules": not_there(_ADAPTERS),
    "vllm.enable_lora": not_there(_ADAPTERS),
    # adapters
    # the objective
    "actor.m2_threshold": later("M2PO, which limits the second moment of the ratios"),
    "actor.behave_imp_weight_cap": goes_to(ALGORITHM + "decoupled.behav_imp_weight_cap", convert=number),
    "actor.behave_imp_weight_mode": _cap_mode,
    "actor.rejection_sampling": later("settings of a table as a whole"),
    "actor.rejection_sampling.level": only("token", does="tokens are judged", otherwise="judging whole sequences"),
    "actor.rejection_sampling.action": goes_to(ALGORITHM + "decoupled.cap_mode"),
    "actor.rejection_sampling.metric": only("ratio", does="ratios are limited", otherwise="limits of a KL divergence"),
    "actor.rejection_sampling.agg": not_there("tokens are judged, so that nothing is aggregated"),
    "actor.rejection_sampling.upper": goes_to(ALGORITHM + "decoupled.behav_imp_weight_cap", convert=number),
    "actor.rejection_sampling.lower": later("a lower limit of ratios in the decoupled loss"),
    "actor.enable_tree_training": later("training on trees of common prefixes", False),
    "teacher.*": later("on-policy distillation from a teacher"),
    "dynamic_bs": later("batches that end when enough samples were seen", False),
    "ref.optimizer.*": not_there("the reference has no optimizer"),
    # weights
    "actor.weight_update_mode": lambda value: (
        Becomes(writes={ENGINE + "weight_sync_backend": "disk"})
        if value == "disk"
        else Becomes(needless="weights are sent from GPU to GPU")
    ),
    # places, traces, trackers
    "*.scheduling_spec[[]*": later("settings of places beside those of docs/launching.md"),
    "rollout.tokenizer_path": not_there("the tokenizer is the policy's"),
    "stats_logger.trackio.*": later("Trackio as a tracker", "disabled"),
}  # fmt: skip
"""Keys in the form of `areal_keys.KEYS`, looked up before them."""

LORA_KEYS = tuple(
    f"{model}.{name}" for model in ("actor", "critic", "ref") for name in (
        "peft_type", "target_modules", "lora_rank", "lora_alpha",
    )
)  # fmt: skip
"""Settings of adapters, which have an effect only with `use_lora` of their model."""
