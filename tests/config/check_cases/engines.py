"""Cases of the checks in `skyrl.config.checks.engines`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import APART, ENGINE, RAY, SERVER, VLLM

EXTRA = ENGINE + "engine_init_kwargs"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "num_engines_is_within_bounds": [
        ({**RAY, ENGINE + "min_engines": 2}, ENGINE + "min_engines"),
        ({**RAY, ENGINE + "num_engines": 3, ENGINE + "max_engines": 2}, ENGINE + "max_engines"),
    ],
    "nccl_needs_engine_support": [
        ({**RAY, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"}, ENGINE + "weight_sync_backend")
    ],
    "servers_support_weight_transport": [
        ({**setting, ENGINE + "weight_sync_backend": transport}, ENGINE + "weight_sync_backend")
        for setting, transport in (
            ({**SERVER, "trainer.placement.executor": "in_process"}, "nccl"),
            ({**SERVER, "trainer.placement.executor": "in_process"}, "gloo"),
            ({**APART, **SERVER, ENGINE + "backend": "sglang"}, "delta"),
            ({**RAY, ENGINE + "backend": "sglang"}, "delta"),
        )
    ],
    "started_engines_get_weights": [({ENGINE + "weight_sync_backend": "none"}, ENGINE + "weight_sync_backend")],
    "external_token_needs_https": [({**SERVER, ENGINE + "external_token": "env:A_TOKEN"}, ENGINE + "external_token")],
    "quantized_samples_are_corrected": [({ENGINE + "rollout_dtype": "bfloat16"}, ENGINE + "rollout_dtype")],
    "object_store_needs_delta_transport": [
        (
            {**RAY, ENGINE + "weight_sync_backend": "disk", ENGINE + "weight_sync_path": "s3://bucket/run"},
            ENGINE + "weight_sync_path",
        )
    ],
    "nccl_needs_cuda": [({**RAY, ENGINE + "weight_sync_backend": "nccl"}, ENGINE + "weight_sync_backend")],
    "vllm_on_cpu_is_eager": [({**VLLM, ENGINE + "enforce_eager": False}, ENGINE + "enforce_eager")],
    "vllm_cpu_is_not_deterministic": [
        ({**VLLM, ENGINE + "deterministic": True}, ENGINE + "deterministic"),
        ({**VLLM, "trainer.deterministic": True}, ENGINE + "deterministic"),
    ],
    "engine_options_have_no_field": [
        ({**VLLM, EXTRA: {"max_num_seqs": 3}}, f"{EXTRA}.max_num_seqs"),
        ({**VLLM, EXTRA: {"logprobs_mode": "raw_logprobs"}}, f"{EXTRA}.logprobs_mode"),
        ({ENGINE + "backend": "sglang", EXTRA: {"tp_size": 2}}, f"{EXTRA}.tp_size"),
        ({ENGINE + "backend": "sglang", EXTRA: {"port": 2}}, f"{EXTRA}.port"),
        ({**VLLM, EXTRA: {"max_model_len": 0}}, f"{EXTRA}.max_model_len"),
        ({**VLLM, EXTRA: {"max_model_len": "auto"}}, f"{EXTRA}.max_model_len"),
    ],
    "int8_needs_cpu": [({"trainer.device": "cuda", ENGINE + "rollout_dtype": "int8"}, ENGINE + "rollout_dtype")],
    "cpu_engine_uses_child_processes": [
        ({**VLLM, ENGINE + f"{kind}_parallel_size": 2}, ENGINE + "distributed_executor_backend")
        for kind in ("tensor", "pipeline", "data")
    ],
    "engine_replicas_need_async_engine": [
        ({**VLLM, ENGINE + "async_engine": False, ENGINE + "data_parallel_size": 2}, ENGINE + "data_parallel_size")
    ],
    "statistics_need_async_engine": [
        (
            {**VLLM, ENGINE + "async_engine": False, ENGINE + "enable_ray_prometheus_stats": True},
            ENGINE + "enable_ray_prometheus_stats",
        )
    ],
    "token_budget_covers_sequences": [
        ({**VLLM, ENGINE + "max_num_batched_tokens": 1023}, ENGINE + "max_num_batched_tokens"),
        ({**VLLM, ENGINE + "max_num_seqs": 8193}, ENGINE + "max_num_batched_tokens"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "num_engines_is_within_bounds": {
        **RAY,
        ENGINE + "num_engines": 2,
        ENGINE + "min_engines": 2,
        ENGINE + "max_engines": 2,
    },
    "servers_support_weight_transport": {**APART, **SERVER, ENGINE + "weight_sync_backend": "gloo"},
    "started_engines_get_weights": {**SERVER, ENGINE + "weight_sync_backend": "none"},
    "external_token_needs_https": {
        **SERVER,
        ENGINE + "external_server_urls": ["https://10.0.0.1:8000", "http://127.0.0.1:8000"],
        ENGINE + "external_token": "env:A_TOKEN",
    },
    "engine_options_have_no_field": {
        ENGINE + "backend": "sglang",
        EXTRA: {"attention_backend": "triton", "max_num_seqs": 3},  # the second is a name of vLLM's
    },
    "int8_needs_cpu": {ENGINE + "rollout_dtype": "int8"},
    "nccl_needs_engine_support": {**VLLM, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"},
    "quantized_samples_are_corrected": {
        ENGINE + "rollout_dtype": "bfloat16",
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": 2.0,
    },
    "object_store_needs_delta_transport": {
        **RAY,
        ENGINE + "weight_sync_backend": "delta",
        ENGINE + "weight_sync_path": "s3://bucket/run",
    },
    "nccl_needs_cuda": {ENGINE + "weight_sync_backend": "nccl"},  # in one process nothing travels
    "vllm_on_cpu_is_eager": {**VLLM, "trainer.device": "cuda", ENGINE + "enforce_eager": False},
    "vllm_cpu_is_not_deterministic": {"trainer.deterministic": True},
    "cpu_engine_uses_child_processes": {
        **VLLM,
        ENGINE + "tensor_parallel_size": 2,
        ENGINE + "distributed_executor_backend": "mp",
    },
    "engine_replicas_need_async_engine": {**VLLM, ENGINE + "data_parallel_size": 2},
    "statistics_need_async_engine": {**VLLM, ENGINE + "enable_ray_prometheus_stats": True},
    "token_budget_covers_sequences": {**VLLM, ENGINE + "max_num_batched_tokens": 1024},
}
