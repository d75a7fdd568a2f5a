"""Facts about the kinds of inference engine, and which of them a configuration asks for.

`BACKENDS` registers the kinds of engine with what each of them can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import attrs

from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.tree.rules import join_choices


@attrs.frozen(kw_only=True)
class EngineBackend:
    """Facts about one kind of inference engine."""

    fields: tuple[str, ...] = ()
    """Fields of `InferenceEngineConfig` that this engine reads, out of those that not every engine reads."""

    is_started_by_the_run: bool = True
    """False for servers that run already."""

    is_embedded: bool = False
    """Whether the engine computes in the process and on the GPU that create it, so that a run may be a single process.
    """

    has_the_learners_dtype: bool = False
    """Whether the engine computes in `rollout_dtype`, else in `trainer.compute_dtype`, whatever `model_dtype` says."""

    can_colocate: bool = True
    """Whether learners may use the engine's GPUs while it does not sample (`colocate_all`)."""

    serves_adapters: bool = False
    """Whether it can be started with several adapters, of which a request names one."""

    scores_prompts: bool = False
    """Whether it computes the probabilities of a prompt (`GenerationRequest.scores_prompt`)."""

    max_logprobs: int | None = None
    """Largest number of log-probabilities that it reports at a token, unless `engine_init_kwargs` says otherwise; None
    without a limit."""

    sleeps: bool = False
    """Whether the engine gives up its weights and cache, with `colocate_all`, whenever learners need the GPU."""

    keeps_prefixes_across_updates: bool = False
    """Whether the engine reuses keys and values of prompts with a common prefix, including those of older weights if
    they are kept."""

    adapters: Literal["", "tensors", "files"] = ""
    """How an adapter (LoRA) is sent to the engine on its own; empty if the engine gets weights with the adapter merged
    in."""

    samples_keep_adapters: bool = False
    """Whether a sample is drawn to its end by the adapter that it began with, so that no sample may be in flight when
    the next adapter arrives."""

    transports: tuple[str, ...] = ("gloo", "disk", "delta")
    """Values of `weight_sync_backend` by which weights reach it in another process."""

    repeats_on_a_cpu: bool = False
    """Whether the engine's `deterministic` mode runs without CUDA."""

    head_sizes_on_a_cpu: bool = False
    """Head sizes of the models that the engine serves on a CPU, which is checked before the run starts."""

    sampling_arguments: tuple[str, ...] = ()
    """Names that `additional_kwargs` of the sampling parameters may have: settings of the engine that change which
    tokens are drawn, not what an answer looks like."""

    external_kind: str = ""
    """Kind of engine for external servers of this backend, which run already; empty if there are none, or if they are
    of the same kind."""

    external_facts: EngineBackend | None = None
    """Facts about external servers of this backend, if they are of the same kind."""

    engine_maker: str = ""
    """Function from the run, and adapters of other policies, to the maker of an engine that the run starts, as
    "module:function"; empty if such engines only run already."""

    server_api: str = ""
    """Class of the `ServerApi` of such servers, as "module:Class"; empty for engines that are no servers."""

    joins_update_groups: bool = False
    """Whether the server joins a process group through routes of its own to receive weights."""

    package: str = ""
    """Package that the engine imports and the `train` extra does not install; `extra` names the extra that does."""

    extra: str = ""


GROUP_TRANSPORTS = ("nccl", "gloo")
"""Values of `weight_sync_backend` by which learner and engines form a group of processes."""

_VLLM_SAMPLING = (
    "allowed_token_ids",
    "bad_words",
    "extra_args",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "stop_token_ids",
    "thinking_token_budget",
)
"""Sampling parameters of vLLM that have no field of their own."""

_SGLANG_SERVER = EngineBackend(
    fields=("model_dtype", "tensor_parallel_size"),
    server_api="skyrl.inference.servers.sglang_server:SGLangServer",
    joins_update_groups=True,
    adapters="files",
    samples_keep_adapters=True,
    is_started_by_the_run=False,
    keeps_prefixes_across_updates=True,
    transports=("disk", "nccl", "gloo"),
    sampling_arguments=("custom_params", "ignore_eos", "logit_bias", "presence_penalty", "stop_regex"),
)

BACKENDS: Mapping[str, EngineBackend] = {
    "vllm": EngineBackend(
        fields=(
            "model_dtype",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "expert_parallel_size",
            "data_parallel_size",
            "async_engine",
            "vllm_v1_disable_multiproc",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "max_num_batched_tokens",
            "enforce_eager",
            "fully_sharded_loras",
            "enable_ray_prometheus_stats",
            "gpu_memory_utilization",
            "distributed_executor_backend",
            "enable_return_routed_experts",
            "language_model_only",
            "engine_init_kwargs",
        ),
        engine_maker="skyrl.experiments.factories:vllm_maker",
        adapters="files",
        serves_adapters=True,
        scores_prompts=True,
        max_logprobs=20,
        sleeps=True,
        keeps_prefixes_across_updates=True,
        transports=("nccl", "gloo", "disk", "delta"),
        head_sizes_on_a_cpu=True,
        sampling_arguments=_VLLM_SAMPLING,
        external_kind="http",
        package="vllm",
        extra="vllm",
    ),
    "torch": EngineBackend(
        fields=("enable_prefix_caching", "enable_return_routed_experts", "rollout_dtype"),
        engine_maker="skyrl.experiments.factories:torch_maker",
        is_embedded=True,
        adapters="tensors",
        serves_adapters=True,
        scores_prompts=True,
        has_the_learners_dtype=True,
        repeats_on_a_cpu=True,
    ),
    "http": EngineBackend(
        fields=("model_dtype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        server_api="skyrl.inference.servers.vllm_server:VLLMServer",
        adapters="files",
        samples_keep_adapters=True,
        is_started_by_the_run=False,
        keeps_prefixes_across_updates=True,
        transports=("disk", "delta", "nccl", "gloo"),
        sampling_arguments=_VLLM_SAMPLING,
    ),
    "sglang": attrs.evolve(
        _SGLANG_SERVER,
        fields=(
            "model_dtype",
            "tensor_parallel_size",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "max_num_batched_tokens",
            "enforce_eager",
            "gpu_memory_utilization",
            "engine_init_kwargs",
        ),
        engine_maker="skyrl.experiments.factories:sglang_maker",
        is_started_by_the_run=True,
        can_colocate=False,
        package="sglang",
        external_facts=_SGLANG_SERVER,
    ),
}
"""Facts about each kind of engine, keyed by the value of `backend`."""


def engine_dtype(engine: InferenceEngineConfig, learners: str) -> str:
    """Type in which the engine computes, as torch writes it, beside a learner that computes in `learners`."""
    dtype = (engine.rollout_dtype or learners) if backend_of(engine).has_the_learners_dtype else engine.model_dtype
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype)


def weight_dtype(engine: InferenceEngineConfig, learners: str) -> str:
    """Type in which weights are sent to the engine: bfloat16 for int8, since the engine quantizes them itself."""
    computed = engine_dtype(engine, learners)
    return "bfloat16" if computed == "int8" else computed


def backend_of(engine: InferenceEngineConfig) -> EngineBackend:
    """Facts about the configured kind of engine; where vLLM engines run already, about a server."""
    backend = BACKENDS[engine.backend]
    return external_backend(backend) if _is_external(engine) else backend


def external_backend(backend: EngineBackend) -> EngineBackend:
    """Facts about external engines of this kind, which run already: about servers, where a run itself starts something
    else.
    """
    return backend.external_facts or (BACKENDS[backend.external_kind] if backend.external_kind else backend)


def kind_of_engine(engine: InferenceEngineConfig) -> str:
    """Name in `BACKENDS` of the kind of engine that the run samples from."""
    return (BACKENDS[engine.backend].external_kind if _is_external(engine) else "") or engine.backend


def _is_external(engine: InferenceEngineConfig) -> bool:
    return bool(engine.external_proxy_url or engine.external_server_urls) or not engine.run_engines_locally


def server_urls(engine: InferenceEngineConfig) -> tuple[str, ...]:
    """Addresses of engines that run already, empty if the run starts them; those of `remote_urls` get a scheme."""
    if engine.external_server_urls or not reads_remote_urls(engine):
        return engine.external_server_urls or ()
    return tuple(url if "://" in url else f"http://{url}" for url in engine.remote_urls)


def reads_remote_urls(engine: InferenceEngineConfig) -> bool:
    """Whether `remote_urls` names the engines. It never makes them engines that run already: SkyRL's files write
    addresses beside `run_engines_locally = true`, which then counts.
    """
    return not engine.external_server_urls and (_is_external(engine) or not backend_of(engine).is_started_by_the_run)


def backends_that(suit: Callable[[EngineBackend], bool], join: str = "and") -> str:
    """Names of the kinds of engine that suit, for a message: `vllm, http and sglang`."""
    return join_choices([name for name, backend in BACKENDS.items() if suit(backend)], join)
