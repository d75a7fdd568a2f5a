"""Converts AReaL's options of SGLang in a conversion that keeps SGLang (`skyrl config convert --keep-engine`).

An option with a field of ours becomes that field, as for vLLM. The others go to `engine_init_kwargs` under their own
names, which are those of SGLang's server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.interop.conversions import ENGINE, Becomes

KEPT = "sglang"
"""The value of `backend` for engines that remain SGLang."""

OTHERS: Mapping[str, tuple[Any, str, Any]] = {
    "sglang.disable_cuda_graph": (False, ENGINE + "enforce_eager", False),
    "sglang.mem_fraction_static": (0.9, ENGINE + "gpu_memory_utilization", 0.9),
    "sglang.chunked_prefill_size": (-1, ENGINE + "enable_chunked_prefill", False),
    **{f"sglang.{name}": (theirs, f"{ENGINE}engine_init_kwargs.{name}", theirs) for name, theirs in (
        ("attention_backend", "fa3"), ("max_prefill_tokens", 32768), ("schedule_policy", "lpm"),
    )},
}  # fmt: skip
"""Defaults in the form of `areal_defaults.OTHERS`, for engines that remain SGLang."""

_AS_FOR_VLLM = (
    "model_path", "random_seed", "skip_tokenizer_init", "dtype", "max_running_requests", "mem_fraction_static",
    "disable_cuda_graph", "disable_radix_cache", "chunked_prefill_size", "dp_size", "enable_multimodal", "enable_lora",
    "max_lora_rank", "lora_paths",
)  # fmt: skip
_OF_THE_RUN = ("host", "port", "device", "tp_size", "enable_deterministic_inference")
_RETURNS_EXPERTS = ("sglang.enable_return_routed_experts", "rollout.return_routed_experts")
_NOT_RETURNED = "routed experts from SGLang engines; vLLM engines return them"
_CONTEXT = "derived from the run's longest prompt and response"
_STAGES = ENGINE + "pipeline_parallel_size"
_LOADER = ENGINE + "engine_init_kwargs.model_loader_extra_config.enable_multithread_load"


def of_sglang(key: str, value: object) -> Becomes | None:
    """Convert `sglang.NAME` or `actor.sglang.NAME`; None for any other setting, and for an option that has the same
    meaning for vLLM.
    """
    table, _, name = key.rpartition(".")
    if key.removeprefix("actor.") in _RETURNS_EXPERTS and value:
        return Becomes(not_yet=_NOT_RETURNED)
    if table not in ("sglang", "actor.sglang") or name in _AS_FOR_VLLM:
        return None
    if name == "context_length":
        return Becomes(needless=_CONTEXT)
    if name in _OF_THE_RUN:
        return Becomes(refused="derived from the run's other settings")
    if name == "enable_multithread_load" and value:  # AReaL passes it to the loader, too
        return Becomes(writes={_LOADER: value})
    if name != "enable_metrics" and (value is None or value is False or value in ("", [])):
        return Becomes(needless="no effect: AReaL does not pass this value to SGLang")
    return Becomes(writes={f"{ENGINE}engine_init_kwargs.{name}": value})


def in_one_stage(found: Becomes) -> Becomes:
    """An allocation's conversion for SGLang engines, which have one pipeline stage here; more are refused."""
    if found.writes.get(_STAGES, 1) != 1:
        return Becomes(not_yet="pipeline parallelism in SGLang engines")
    return evolve(found, writes={path: value for path, value in found.writes.items() if path != _STAGES})
