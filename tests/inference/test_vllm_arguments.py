from __future__ import annotations

import os
from typing import Any

import attrs
import pytest

from skyrl.config import InferenceEngineConfig
from skyrl.config.derive.engine_options import OTHER_NAME, SAME_NAME, VLLM_FIXED, VLLM_SETTINGS
from skyrl.errors import ConfigError
from skyrl.inference.vllm import environment as vllm_environment
from skyrl.inference.vllm.arguments import engine_arguments
from skyrl.inference.vllm.environment import set_variables, variables
from skyrl.inference.vllm.model import ModelFacts
from skyrl.tree.classes import fields_of

KNOWN = {
    *SAME_NAME,
    *OTHER_NAME.values(),
    *VLLM_FIXED,
    *VLLM_SETTINGS,
    "kv_cache_memory_bytes",
    "max_model_len",
    "block_size",
    "hf_overrides",
    "quantization",
}
NOT_ARGUMENTS = {
    "backend": "chooses vLLM",
    "async_engine": "chooses the class: AsyncLLM or LLMEngine",
    "vllm_v1_disable_multiproc": "is the variable VLLM_ENABLE_V1_MULTIPROCESSING",
    "rollout_dtype": "is the torch engine's, vLLM has model_dtype",
    "deterministic": "is the variable VLLM_BATCH_INVARIANT",
    "engine_init_kwargs": "is more arguments, each under its own name",
    "fully_sharded_loras": "belongs to adapters, and is an argument where there is one",
    "num_engines": "is how many such engines are started",
    "min_engines": "is how few may be left",
    "max_engines": "is how many there may be",
    "max_engine_restarts": "is how often one is started again",
    "engine_restart_backoff_seconds": "is when",
    "run_engines_locally": "says that they are started here",
    "remote_urls": "names engines that others started",
    "external_proxy_url": "names engines that others started",
    "external_server_urls": "names engines that others started",
    "external_token": "belongs to engines that others started",
    "weight_sync_backend": "is the transport of weights to the engine",
    "weight_sync_path": "is the transport of weights to the engine",
    "weight_transfer_threshold_cuda_ipc_GB": "is the transport of weights to the engine",
    "logprob_parity_bound": "is what the learner holds the engine to",
    "logprob_parity_interval": "is how often the learner does so",
    "override_existing_update_group": "is the transport of weights to the engine",
    "enable_http_endpoint": "is the run's own endpoint",
    "http_endpoint_host": "is the run's own endpoint",
    "http_endpoint_port": "is the run's own endpoint",
}
"""Fields that are not arguments of vLLM, each with its role."""

MODEL = ModelFacts(head_dims=(32,), kv_numbers_per_token=128, positions=256, eos_ids=(1,), vocabulary=64)


def arguments(device: str = "cuda", model: ModelFacts = MODEL, max_model_len: int = 256, **fields: Any) -> Any:
    return engine_arguments(
        InferenceEngineConfig(**fields),
        model_path="a/model",
        model=model,
        seed=7,
        device=device,
        max_model_len=max_model_len,
        known=KNOWN,
    )


def problems(device: str = "cuda", **fields: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        arguments(device, **fields)
    return {p.path.removeprefix("generator.inference_engine."): f"{p.message}; {p.hint}" for p in caught.value.problems}


def test_variables_of_an_earlier_engine_give_way_and_those_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_environment, "_SET_HERE", set())
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "INFO"})
    one, other = (
        InferenceEngineConfig(async_engine=False, deterministic=deterministic) for deterministic in (True, False)
    )
    set_variables(one, "cpu")
    assert os.environ == variables(one, "cpu") | {"VLLM_LOGGING_LEVEL": "INFO"}
    assert "VLLM_BATCH_INVARIANT" in os.environ
    set_variables(other, "cpu")
    assert os.environ == variables(other, "cpu") | {"VLLM_LOGGING_LEVEL": "INFO"}


def test_on_a_cpu_no_prompt_is_read_in_pieces_unless_a_step_cannot_hold_it() -> None:
    assert arguments("cpu")["enable_chunked_prefill"] is False
    assert arguments("cpu", max_model_len=8193)["enable_chunked_prefill"] is True  # a step holds 8192 tokens
    assert arguments("cpu", max_model_len=8193, max_num_batched_tokens=9000)["enable_chunked_prefill"] is False
    assert arguments("cuda")["enable_chunked_prefill"] is True


def test_values_of_the_models_configuration_are_the_learners() -> None:
    init_kwargs = {"hf_overrides": {"a": 1, "rope_parameters": {"factor": 2.0}}}
    learner_overrides = {"rope_parameters": {"factor": 2.0, "rope_theta": 1e4}, "b": 2}
    config = InferenceEngineConfig(engine_init_kwargs=init_kwargs)
    settings: dict[str, Any] = {"model_path": "m", "model": MODEL, "seed": 7, "device": "cuda", "max_model_len": 256}
    hf_overrides = engine_arguments(config, **settings, known=KNOWN, overrides=learner_overrides)["hf_overrides"]
    assert hf_overrides == {"a": 1, **learner_overrides}
    with pytest.raises(ConfigError, match=r"hf_overrides\.a .*1 is not 3, which the learner's model has"):
        engine_arguments(config, **settings, known=KNOWN, overrides={"a": 3})


def test_an_argument_that_repeats_its_field_and_a_length_of_ones_own_are_passed_on() -> None:
    init_kwargs = {"language_model_only": True, "max_model_len": 4096}
    engine_args = arguments(language_model_only=True, engine_init_kwargs=init_kwargs)
    assert {name: engine_args[name] for name in init_kwargs} == init_kwargs
    assert "set that one" in problems(engine_init_kwargs=init_kwargs)["engine_init_kwargs.language_model_only"]


def test_a_model_without_stored_weights_is_filled_by_the_learner() -> None:
    settings: dict[str, Any] = {"model_path": "m", "model": MODEL, "seed": 7, "device": "cuda", "max_model_len": 256}
    config = InferenceEngineConfig()
    assert engine_arguments(config, **settings, known=KNOWN, stored_weights=False)["load_format"] == "dummy"
    assert "load_format" not in engine_arguments(config, **settings, known=KNOWN)


def test_an_engine_has_room_for_the_adapter_that_is_trained() -> None:
    settings: dict[str, Any] = {"model_path": "m", "model": MODEL, "seed": 7, "device": "cuda", "max_model_len": 256}
    config = InferenceEngineConfig(fully_sharded_loras=True)
    engine_args = engine_arguments(config, **settings, known=KNOWN, lora_ranks=[12])
    assert (engine_args["enable_lora"], engine_args["max_loras"], engine_args["max_lora_rank"]) == (True, 1, 16)
    assert engine_args["fully_sharded_loras"] is True
    assert "enable_lora" not in engine_arguments(config, **settings, known=KNOWN)
    on_a_cpu = engine_arguments(config, **settings | {"device": "cpu"}, known=KNOWN, lora_ranks=[12, 4, 8])
    assert on_a_cpu["max_loras"] == 4  # one stays empty
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model\.lora\.rank"):
        engine_arguments(config, **settings, known=KNOWN, lora_ranks=[513])


def test_a_tokenizer_of_its_own_reaches_vllm() -> None:
    settings: dict[str, Any] = {"model_path": "m", "model": MODEL, "seed": 7, "device": "cuda", "max_model_len": 256}
    engine_args = engine_arguments(InferenceEngineConfig(), **settings, known=KNOWN, tokenizer_path="t")
    assert (engine_args["model"], engine_args["tokenizer"]) == ("m", "t")


def test_every_field_reaches_vllm_or_is_known_to_be_something_else() -> None:
    lists = [set(SAME_NAME), set(OTHER_NAME), set(NOT_ARGUMENTS)]
    fields = set(fields_of(InferenceEngineConfig))
    assert set.union(*lists) == fields
    assert sum(map(len, lists)) == len(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_parallel_size", 4),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("enforce_eager", True),
        ("enable_prefix_caching", False),
        ("enable_chunked_prefill", False),
        ("max_num_batched_tokens", 4096),
        ("max_num_seqs", 12),
        ("gpu_memory_utilization", 0.5),
        ("served_model_name", "policy"),
    ],
)
def test_a_field_of_the_same_name_is_handed_over(field: str, value: Any) -> None:
    assert arguments().get(field) != value
    assert arguments(**{field: value})[field] == value


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"model_dtype": "float32"}, {"dtype": "float32"}),
        ({"expert_parallel_size": 1}, {"enable_expert_parallel": False}),
        ({"expert_parallel_size": 4, "tensor_parallel_size": 4}, {"enable_expert_parallel": True}),
        ({"distributed_executor_backend": "mp"}, {"distributed_executor_backend": None}),  # one GPU needs neither
        (
            {"distributed_executor_backend": "ray", "tensor_parallel_size": 2},
            {"distributed_executor_backend": "ray"},
        ),
        ({"enable_ray_prometheus_stats": True}, {"disable_log_stats": False}),
        ({"enable_ray_prometheus_stats": False}, {"disable_log_stats": True}),
        ({"engine_init_kwargs": {"hf_overrides": {"a": [1]}}}, {"hf_overrides": {"a": [1]}}),
        ({"engine_init_kwargs": {"quantization": "fp8"}}, {"quantization": "fp8"}),
    ],
)
def test_a_field_of_another_name_is_translated(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    engine_args = arguments(**fields)
    assert {name: engine_args[name] for name in expected} == expected


def test_what_follows_from_the_run_is_there() -> None:
    engine_args = arguments()
    assert (engine_args["model"], engine_args["seed"], engine_args["max_model_len"]) == ("a/model", 7, 256)
    assert engine_args["worker_extension_cls"] == "skyrl.inference.vllm.worker.WorkerExtension"


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"expert_parallel_size": 3, "tensor_parallel_size": 2}, "expert_parallel_size", "set it to 1 or 2"),
        ({"data_parallel_size": 2, "async_engine": False}, "data_parallel_size", "async_engine = true"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 65}, "max_num_batched_tokens", "max_num_seqs = 65"),
        (
            {"max_num_batched_tokens": 255, "max_num_seqs": 8, "enable_chunked_prefill": False},
            "max_num_batched_tokens",
            "raise it to 256",
        ),
        ({"enable_ray_prometheus_stats": True, "async_engine": False}, "enable_ray_prometheus_stats", "no metrics"),
        ({"engine_init_kwargs": {"blok_size": 16}}, "engine_init_kwargs.blok_size", "did you mean block_size?"),
        ({"engine_init_kwargs": {"max_num_seqs": 1}}, "engine_init_kwargs.max_num_seqs", "max_num_seqs; set that one"),
        ({"engine_init_kwargs": {"dtype": "auto"}}, "engine_init_kwargs.dtype", "inference_engine.model_dtype"),
        ({"engine_init_kwargs": {"logprobs_mode": "raw"}}, "engine_init_kwargs.logprobs_mode", "cannot be set"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_a_remedy(fields: dict[str, Any], path: str, message: str) -> None:
    assert message in problems(**fields)[path]


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"deterministic": True}, "deterministic", 'backend = "torch"'),
        ({"tensor_parallel_size": 2}, "distributed_executor_backend", "set it to mp"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_there_only(fields: dict[str, Any], path: str, message: str) -> None:
    assert message in problems("cpu", **fields)[path]
    assert arguments("cuda", **fields)


def test_heads_that_vllm_has_no_kernel_for_on_a_cpu_are_refused_before_it_starts() -> None:
    narrow = attrs.evolve(MODEL, head_dims=(16, 32))
    with pytest.raises(ConfigError, match="heads have 16 dimensions; vLLM on a CPU computes 32, 64, 80, 96, 112, 128"):
        arguments("cpu", model=narrow)
    assert arguments("cuda", model=narrow)


def test_every_mistake_is_told_at_once() -> None:
    fields: dict[str, Any] = {"deterministic": True, "tensor_parallel_size": 2, "engine_init_kwargs": {"x": 1}}
    assert len(problems("cpu", **fields)) == 3


@pytest.mark.parametrize(("device", "eager"), [("cpu", True), ("cuda", False)])
def test_cuda_graphs_are_recorded_on_cuda_alone(device: str, eager: bool) -> None:
    assert arguments(device)["enforce_eager"] is eager


def test_the_cache_on_a_cpu_has_room_for_its_sequences_and_a_floor() -> None:
    assert arguments("cpu")["kv_cache_memory_bytes"] == 64 * 2**20
    large = attrs.evolve(MODEL, kv_numbers_per_token=8192)
    engine_args = arguments("cpu", model=large, max_model_len=130, max_num_seqs=8, model_dtype="float32")
    # 130 tokens take two blocks of 128; eight sequences and the block that vLLM keeps; four bytes a number
    assert engine_args["kv_cache_memory_bytes"] == (256 * 8 + 128) * 8192 * 4 == 71_303_168
    assert "kv_cache_memory_bytes" not in arguments("cuda")
    assert arguments("cpu", engine_init_kwargs={"kv_cache_memory_bytes": 5})["kv_cache_memory_bytes"] == 5


def test_variables_follow_the_fields_that_are_variables_to_vllm() -> None:
    usual = variables(InferenceEngineConfig(), "cuda")
    assert usual["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "TORCHDYNAMO_DISABLE" not in usual
    assert "VLLM_BATCH_INVARIANT" not in usual
    other = variables(InferenceEngineConfig(vllm_v1_disable_multiproc=False, deterministic=True), "cpu")
    assert other["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert other["VLLM_BATCH_INVARIANT"] == "1"
    assert other["TORCHDYNAMO_DISABLE"] == "1"
