"""Converts AReaL's options of SGLang in a conversion that keeps SGLang (`skyrl config convert --keep-engine`).

An option with a field of ours becomes that field, as for vLLM. The others go to `engine_init_kwargs` under their own
names, which are those of SGLang's server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.interop.translation import ENGINE, Dependent, Translation, Values, redundant, refused, unsupported

KEPT = "sglang"
"""The value of `backend` for engines that remain SGLang."""

OTHERS: Mapping[str, tuple[Any, str, Any]] = {
    "sglang.disable_cuda_graph": (False, ENGINE + "enforce_eager", False),
    "sglang.mem_fraction_static": (0.9, ENGINE + "gpu_memory_utilization", 0.9),
    "sglang.chunked_prefill_size": (-1, ENGINE + "enable_chunked_prefill", False),
    **{f"sglang.{name}": (default, f"{ENGINE}engine_init_kwargs.{name}", default) for name, default in (
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
_STAGES = ENGINE + "pipeline_parallel_size"
_LOADER = ENGINE + "engine_init_kwargs.model_loader_extra_config.enable_multithread_load"


def for_sglang(dependent: Mapping[str, Dependent]) -> dict[str, Dependent]:
    """The table of dependent settings, changed for engines that remain SGLang."""
    options = dict.fromkeys(("sglang.*", "actor.sglang.*", "rollout.return_routed_experts"), _option)
    return {**dependent, **options, **{key: _single_stage(dependent[key]) for key in ("allocation_mode", "*.backend")}}


def _option(key: str, value: object, values: Values) -> Translation | None:
    """Convert `sglang.NAME` or `actor.sglang.NAME`; None for an option that has the same meaning for vLLM."""
    table, _, name = key.rpartition(".")
    if name in ("enable_return_routed_experts", "return_routed_experts") and value:
        return unsupported("routed experts from SGLang engines; vLLM engines return them")
    if table not in ("sglang", "actor.sglang") or name in _AS_FOR_VLLM:
        return None
    if name == "context_length":
        return redundant("derived from the run's longest prompt and response")
    if name in _OF_THE_RUN:
        return refused("derived from the run's other settings")
    if name == "enable_multithread_load" and value:  # AReaL passes it to the loader, too
        return Translation(writes={_LOADER: value})
    if name != "enable_metrics" and (value is None or value is False or value in ("", [])):
        return redundant("no effect: AReaL does not pass this value to SGLang")
    return Translation(writes={f"{ENGINE}engine_init_kwargs.{name}": value})


def _single_stage(convert: Dependent) -> Dependent:
    """The conversion of an allocation, for SGLang engines: they have one pipeline stage here, and more are refused."""

    def become(key: str, value: object, values: Values) -> Translation | None:
        translation = convert(key, value, values)
        if translation is None:
            return None
        writes = dict(translation.writes)
        if writes.pop(_STAGES, 1) != 1:
            return unsupported("pipeline parallelism in SGLang engines")
        return evolve(translation, writes=writes)

    return become
