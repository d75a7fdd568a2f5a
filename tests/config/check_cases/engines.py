"""Cases of the checks in `skyrl.config.checks.engines`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import APART, ENGINE, RAY, SERVER, VLLM

EXTRA = ENGINE + "engine_init_kwargs"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "the_number_of_engines_is_within_its_bounds": [
        ({**RAY, ENGINE + "min_engines": 2}, ENGINE + "min_engines"),
        ({**RAY, ENGINE + "num_engines": 3, ENGINE + "max_engines": 2}, ENGINE + "max_engines"),
    ],
    "nccl_is_vllms": [
        ({**RAY, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"}, ENGINE + "weight_sync_backend")
    ],
    "weights_have_a_way_to_servers": [
        ({**setting, ENGINE + "weight_sync_backend": way}, ENGINE + "weight_sync_backend")
        for setting, way in (
            ({**SERVER, "trainer.placement.executor": "in_process"}, "nccl"),
            ({**SERVER, "trainer.placement.executor": "in_process"}, "gloo"),
            ({**APART, **SERVER, ENGINE + "backend": "sglang"}, "delta"),
            ({**RAY, ENGINE + "backend": "sglang"}, "delta"),
        )
    ],
    "engines_of_the_run_get_its_weights": [({ENGINE + "weight_sync_backend": "none"}, ENGINE + "weight_sync_backend")],
    "a_token_is_not_shown_to_the_network": [
        ({**SERVER, ENGINE + "external_token": "env:A_TOKEN"}, ENGINE + "external_token")
    ],
    "samples_of_rounded_weights_are_corrected": [({ENGINE + "rollout_dtype": "bfloat16"}, ENGINE + "rollout_dtype")],
    "only_differences_travel_through_an_object_store": [
        (
            {**RAY, ENGINE + "weight_sync_backend": "disk", ENGINE + "weight_sync_path": "s3://bucket/run"},
            ENGINE + "weight_sync_path",
        )
    ],
    "nccl_has_cuda": [({**RAY, ENGINE + "weight_sync_backend": "nccl"}, ENGINE + "weight_sync_backend")],
    "vllm_on_a_cpu_computes_eagerly": [({**VLLM, ENGINE + "enforce_eager": False}, ENGINE + "enforce_eager")],
    "vllm_on_a_cpu_promises_no_repetition": [
        ({**VLLM, ENGINE + "deterministic": True}, ENGINE + "deterministic"),
        ({**VLLM, "trainer.deterministic": True}, ENGINE + "deterministic"),
    ],
    "options_of_engines_are_no_settings_of_the_run": [
        ({**VLLM, EXTRA: {"max_num_seqs": 3}}, f"{EXTRA}.max_num_seqs"),
        ({**VLLM, EXTRA: {"logprobs_mode": "raw_logprobs"}}, f"{EXTRA}.logprobs_mode"),
        ({ENGINE + "backend": "sglang", EXTRA: {"tp_size": 2}}, f"{EXTRA}.tp_size"),
        ({ENGINE + "backend": "sglang", EXTRA: {"port": 2}}, f"{EXTRA}.port"),
        ({**VLLM, EXTRA: {"max_model_len": 0}}, f"{EXTRA}.max_model_len"),
        ({**VLLM, EXTRA: {"max_model_len": "auto"}}, f"{EXTRA}.max_model_len"),
    ],
    "eight_bits_are_for_a_cpu": [
        ({"trainer.device": "cuda", ENGINE + "rollout_dtype": "int8"}, ENGINE + "rollout_dtype")
    ],
    "parts_of_an_engine_on_a_cpu_are_child_processes": [
        ({**VLLM, ENGINE + f"{kind}_parallel_size": 2}, ENGINE + "distributed_executor_backend")
        for kind in ("tensor", "pipeline", "data")
    ],
    "copies_inside_an_engine_are_asynchronous": [
        ({**VLLM, ENGINE + "async_engine": False, ENGINE + "data_parallel_size": 2}, ENGINE + "data_parallel_size")
    ],
    "statistics_come_from_the_asynchronous_engine": [
        (
            {**VLLM, ENGINE + "async_engine": False, ENGINE + "enable_ray_prometheus_stats": True},
            ENGINE + "enable_ray_prometheus_stats",
        )
    ],
    "every_sequence_of_a_step_has_a_token": [
        ({**VLLM, ENGINE + "max_num_batched_tokens": 1023}, ENGINE + "max_num_batched_tokens"),
        ({**VLLM, ENGINE + "max_num_seqs": 8193}, ENGINE + "max_num_batched_tokens"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "the_number_of_engines_is_within_its_bounds": {
        **RAY,
        ENGINE + "num_engines": 2,
        ENGINE + "min_engines": 2,
        ENGINE + "max_engines": 2,
    },
    "weights_have_a_way_to_servers": {**APART, **SERVER, ENGINE + "weight_sync_backend": "gloo"},
    "engines_of_the_run_get_its_weights": {**SERVER, ENGINE + "weight_sync_backend": "none"},
    "a_token_is_not_shown_to_the_network": {
        **SERVER,
        ENGINE + "external_server_urls": ["https://10.0.0.1:8000", "http://127.0.0.1:8000"],
        ENGINE + "external_token": "env:A_TOKEN",
    },
    "options_of_engines_are_no_settings_of_the_run": {
        ENGINE + "backend": "sglang",
        EXTRA: {"attention_backend": "triton", "max_num_seqs": 3},  # the second is a name of vLLM's
    },
    "eight_bits_are_for_a_cpu": {ENGINE + "rollout_dtype": "int8"},
    "nccl_is_vllms": {**VLLM, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"},
    "samples_of_rounded_weights_are_corrected": {
        ENGINE + "rollout_dtype": "bfloat16",
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": 2.0,
    },
    "only_differences_travel_through_an_object_store": {
        **RAY,
        ENGINE + "weight_sync_backend": "delta",
        ENGINE + "weight_sync_path": "s3://bucket/run",
    },
    "nccl_has_cuda": {ENGINE + "weight_sync_backend": "nccl"},  # in one process nothing travels
    "vllm_on_a_cpu_computes_eagerly": {**VLLM, "trainer.device": "cuda", ENGINE + "enforce_eager": False},
    "vllm_on_a_cpu_promises_no_repetition": {"trainer.deterministic": True},
    "parts_of_an_engine_on_a_cpu_are_child_processes": {
        **VLLM,
        ENGINE + "tensor_parallel_size": 2,
        ENGINE + "distributed_executor_backend": "mp",
    },
    "copies_inside_an_engine_are_asynchronous": {**VLLM, ENGINE + "data_parallel_size": 2},
    "statistics_come_from_the_asynchronous_engine": {**VLLM, ENGINE + "enable_ray_prometheus_stats": True},
    "every_sequence_of_a_step_has_a_token": {**VLLM, ENGINE + "max_num_batched_tokens": 1024},
}
