"""Options of engines: fields of `InferenceEngineConfig` that set them, and names refused in `engine_init_kwargs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skyrl.config.derive.engine_backends import kind_of_engine
from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.errors import Problem
from skyrl.tree.types import display_value

TABLE = "generator.inference_engine"
"""Dotted path of the table that the fields belong to."""

SAME_NAME = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_return_routed_experts",
    "language_model_only",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
)
"""Fields that vLLM has under the same name and with the same meaning."""

OTHER_NAME = {
    "model_dtype": "dtype",
    "expert_parallel_size": "enable_expert_parallel",
    "distributed_executor_backend": "distributed_executor_backend",
    "served_model_name": "served_model_name",
    "enable_ray_prometheus_stats": "disable_log_stats",
}
"""Fields that reach vLLM translated, and the arguments they become."""

VLLM_SETTINGS = {
    "model": "trainer.policy.model.path",
    "tokenizer": "trainer.tokenizer_path",
    "seed": "trainer.seed",
    **{argument: f"{TABLE}.{field}" for field, argument in OTHER_NAME.items()},
    **{name: f"{TABLE}.{name}" for name in SAME_NAME},
    "fully_sharded_loras": f"{TABLE}.fully_sharded_loras",
    "enable_lora": "trainer.policy.model.lora",
}
"""Arguments of vLLM that a field of the tree sets, each with the path of that field."""

VLLM_FIXED = {
    "logprobs_mode": "log-probabilities are always those of the tempered distribution",
    "worker_extension_cls": "skyrl's own receives the weights",
    "generation_config": "sampling settings come from the run alone",
    "skip_tokenizer_init": "stop texts need the tokenizer",
    "worker_cls": "skyrl's extension is written for vLLM's own workers",
    "speculative_config": "drafted tokens come without the log-probabilities that training needs",
    "spec_method": "drafted tokens come without the log-probabilities that training needs",
    "spec_model": "drafted tokens come without the log-probabilities that training needs",
    "spec_tokens": "drafted tokens come without the log-probabilities that training needs",
    "weight_transfer_config": "generator.inference_engine.weight_sync_backend chooses the transport",
    "enable_sleep_mode": "trainer.placement decides whether engines share their GPUs",
}
"""Arguments of vLLM that users cannot set, each with the reason."""

SGLANG_SETTINGS = {
    "model_path": "trainer.policy.model.path",
    "random_seed": "trainer.seed",
    "device": "trainer.device",
    "enable_lora": "trainer.policy.model.lora",
    "max_lora_rank": "trainer.policy.model.lora.rank",
    "chunked_prefill_size": f"{TABLE}.enable_chunked_prefill and max_num_batched_tokens",
    "disable_cuda_graph": f"{TABLE}.enforce_eager",
    "disable_radix_cache": f"{TABLE}.enable_prefix_caching",
    "dp_size": f"{TABLE}.num_engines",
    "dtype": f"{TABLE}.model_dtype",
    "enable_deterministic_inference": f"{TABLE}.deterministic",
    "max_running_requests": f"{TABLE}.max_num_seqs",
    "mem_fraction_static": f"{TABLE}.gpu_memory_utilization",
    "tp_size": f"{TABLE}.tensor_parallel_size",
}
"""Options of SGLang's server that a field of the tree sets, each with the path of that field."""

SGLANG_FIXED = {
    "host": "the server listens on the machine of the run alone",
    "port": "the run takes one that is free",
}
"""Options of SGLang's server that users cannot set, each with the reason."""


def length_option(engine: InferenceEngineConfig) -> str:
    """Name of the engine's option for its maximum sequence length in tokens; empty if it has none."""
    return {"vllm": "max_model_len", "sglang": "context_length"}.get(kind_of_engine(engine), "")


def given_length(engine: InferenceEngineConfig) -> int | None:
    """Maximum sequence length in tokens that `engine_init_kwargs` sets; None: the length that the run needs."""
    length = engine.engine_init_kwargs.get(length_option(engine))
    return length if type(length) is int else None


def refused_options(engine: InferenceEngineConfig) -> Iterator[Problem]:
    """Problems for entries of `engine_init_kwargs` that the run or another field sets, and for an invalid length."""
    refused: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]
    refused = {"vllm": (VLLM_SETTINGS, VLLM_FIXED), "sglang": (SGLANG_SETTINGS, SGLANG_FIXED)}
    settings, fixed = refused.get(kind_of_engine(engine), ({}, {}))
    for name, value in engine.engine_init_kwargs.items():
        path = f"{TABLE}.engine_init_kwargs.{name}"
        if name in fixed:
            yield Problem(path=path, message=f"cannot be set: {fixed[name]}", hint="leave it out")
        elif name in settings and (name not in SAME_NAME or value != getattr(engine, name)):
            yield Problem(path=path, message=f"has a setting of its own: {settings[name]}", hint="set that one")
        elif name == length_option(engine) and (given_length(engine) or 0) < 1:
            message = f"is not a number of tokens: {display_value(value)}"
            yield Problem(
                path=path, message=message, hint="leave it out to get as many as the run needs, or give a number"
            )
