"""Translates settings to vLLM's arguments: the name under which each is passed on, and the reasons for refusing some.

Start with `engine_arguments`. Nothing here imports vLLM, so that every field can be examined without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from skyrl.config import InferenceEngineConfig
from skyrl.config.derive.engine_backends import engine_dtype
from skyrl.config.derive.engine_options import SAME_NAME, TABLE, VLLM_FIXED, VLLM_SETTINGS, refused_options
from skyrl.errors import ConfigError, Problem
from skyrl.inference.vllm.model import HEAD_SIZES_ON_CPU, ModelFacts
from skyrl.tree import FrozenDict, thaw
from skyrl.tree.names import nearest

SMALLEST_CPU_CACHE = 64 * 2**20
"""Smallest default size of the key-value cache of an engine on a CPU, in bytes."""

_SEQUENCES_ON_CPU = 32
"""Number of sequences of full length that fit the default cache of an engine on a CPU."""

_CPU_BLOCK = 128
"""Number of tokens in one block of vLLM's cache on a CPU."""


def engine_arguments(
    config: InferenceEngineConfig,
    *,
    model_path: str,
    model: ModelFacts,
    seed: int,
    device: str,
    max_model_len: int,
    known: Collection[str],
    overrides: Mapping[str, Any] = FrozenDict(),
    stored_weights: bool = True,
    lora_ranks: Sequence[int] = (),
    tokenizer_path: str | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs` or `EngineArgs`.

    `device` is `cpu` or `cuda`; `max_model_len` is in tokens, prompt and completion together; `known` are the names of
    the arguments that the installed vLLM has; `overrides` are values of the model's own configuration. Without
    `stored_weights`, vLLM fills the model with dummy weights until it receives others. There is room for one adapter of
    each of `lora_ranks`. Raises `ConfigError`, which lists all settings that vLLM does not support.
    """
    problems = [*_refused(config, device, max_model_len), *_unsuitable(model, device)]
    problems += _extra_refused(config, known, overrides)
    if problems:
        raise ConfigError(problems, "vLLM cannot serve this run")
    gpus = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    arguments = {name: getattr(config, name) for name in SAME_NAME}
    arguments |= {
        "model": model_path,
        "dtype": engine_dtype(config, "auto"),
        "seed": seed % 2**32,
        "max_model_len": max_model_len,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "distributed_executor_backend": config.distributed_executor_backend if gpus > 1 else None,
        "disable_log_stats": not config.enable_ray_prometheus_stats,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        "logprobs_mode": "processed_logits",
        "worker_extension_cls": "skyrl.inference.vllm.worker.WorkerExtension",
    }
    if tokenizer_path is not None:
        arguments["tokenizer"] = tokenizer_path
    if lora_ranks:
        arguments |= {
            "enable_lora": True,
            # on a CPU, vLLM computes samples without an adapter with the one in its last slot, which has to be empty
            "max_loras": len(lora_ranks) + (device == "cpu"),
            "max_lora_rank": _room_for(max(lora_ranks)),
            "fully_sharded_loras": config.fully_sharded_loras,
        }
    if not stored_weights:
        arguments["load_format"] = "dummy"
    if config.served_model_name is not None:
        arguments["served_model_name"] = config.served_model_name
    if device == "cpu":
        # after each chunk of a prompt vLLM resets a seeded generator, which fails on a CPU: its generator has no offset
        arguments["enforce_eager"] = True  # there are no CUDA graphs, and compiling takes minutes
        arguments["enable_chunked_prefill"] &= config.max_num_batched_tokens < max_model_len
        arguments["kv_cache_memory_bytes"] = _cpu_cache(config, model, arguments["dtype"], max_model_len)
    else:
        arguments["enable_sleep_mode"] = True
    settings: dict[str, Any] = thaw(config.engine_init_kwargs)
    replaced = {**(settings.get("hf_overrides") or {}), **overrides}
    return arguments | settings | ({"hf_overrides": replaced} if replaced else {})


def _room_for(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that has room for this rank. Raises `ConfigError` if there is none."""
    for most in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= most:
            return most
    problem = Problem(
        path="trainer.policy.model.lora.rank",
        message=f"{rank}: vLLM serves adapters of ranks up to 512",
        hint="lower it",
    )
    raise ConfigError([problem])


def _cpu_cache(config: InferenceEngineConfig, model: ModelFacts, dtype: str, max_model_len: int) -> int:
    """Size of the key-value cache in bytes. vLLM's default is 90 % of the machine's memory, too much for a run that
    also trains.
    """
    bytes_per_token = model.kv_numbers_per_token * (4 if dtype == "float32" else 2)
    longest = -(-max_model_len // _CPU_BLOCK) * _CPU_BLOCK
    # one more block: vLLM reserves the first for itself
    sequences = min(config.max_num_seqs, _SEQUENCES_ON_CPU)
    return max(SMALLEST_CPU_CACHE, bytes_per_token * (longest * sequences + _CPU_BLOCK))


def _refused(config: InferenceEngineConfig, device: str, max_model_len: int) -> Iterator[Problem]:
    """Settings that vLLM does not support: parallelism, sizes, features."""
    dealt = config.data_parallel_size * config.tensor_parallel_size
    if config.expert_parallel_size not in (1, dealt):
        yield _problem(
            "expert_parallel_size",
            f"{config.expert_parallel_size}: vLLM spreads experts over all {dealt} GPUs of an engine (data times "
            "tensor parallel size) or over none",
            f"set it to 1 or {dealt}",
        )
    if config.data_parallel_size > 1 and not config.async_engine:
        yield _problem(
            "data_parallel_size", "vLLM's offline engine holds one copy of the weights", "async_engine = true"
        )
    several = max(config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size) > 1
    if device == "cpu" and several and config.distributed_executor_backend == "ray":
        yield _problem(
            "distributed_executor_backend", "on a CPU, vLLM's parallel workers are child processes", "set it to mp"
        )
    tokens = config.max_num_batched_tokens
    if tokens < config.max_num_seqs:
        yield _problem(
            "max_num_batched_tokens",
            f"{tokens} tokens a step are fewer than max_num_seqs = {config.max_num_seqs}, which need one each",
            "raise it, or lower max_num_seqs",
        )
    if not config.enable_chunked_prefill and tokens < max_model_len:
        yield _problem(
            "max_num_batched_tokens",
            f"{tokens} tokens a step do not hold a sequence of {max_model_len}, and enable_chunked_prefill is off",
            f"raise it to {max_model_len}, or set enable_chunked_prefill = true",
        )
    if device == "cpu" and config.deterministic:
        yield _problem(
            "deterministic",
            "vLLM's batch-invariant kernels exist for GPUs only",
            'set it to false, or backend = "torch", which has a deterministic mode on a CPU',
        )
    if device == "cpu" and config.enable_return_routed_experts:
        yield _problem(
            "enable_return_routed_experts",
            "vLLM returns routed experts only with its second model runner, which needs Triton and thus a GPU",
            'set it to false, or backend = "torch"',
        )
    if config.enable_ray_prometheus_stats and not config.async_engine:
        yield _problem("enable_ray_prometheus_stats", "vLLM's offline engine exports no metrics", "async_engine = true")


def refuse_unsuitable(model: ModelFacts, device: str) -> None:
    """Raises `ConfigError` for a model that vLLM does not compute on this device, `cpu` or `cuda`."""
    if problems := list(_unsuitable(model, device)):
        raise ConfigError(problems)


def _unsuitable(model: ModelFacts, device: str) -> Iterator[Problem]:
    odd = [str(size) for size in model.head_dims if size and size not in HEAD_SIZES_ON_CPU]
    if device == "cpu" and odd:
        sizes = ", ".join(map(str, HEAD_SIZES_ON_CPU))
        yield Problem(
            path="trainer.policy.model.path",
            message=f"its attention heads have {' and '.join(odd)} dimensions; vLLM on a CPU computes {sizes}",
            hint=f'use another model, or {TABLE}.backend = "torch"',
        )


def _extra_refused(
    config: InferenceEngineConfig, known: Collection[str], overrides: Mapping[str, Any]
) -> Iterator[Problem]:
    yield from refused_options(config)
    for name in config.engine_init_kwargs:
        if name not in {*VLLM_FIXED, *VLLM_SETTINGS} and (name not in known or name.startswith("_")):
            nearest_name = nearest(name, sorted(known))
            hint = f"did you mean {nearest_name}?" if nearest_name else "see vllm.AsyncEngineArgs"
            yield _problem(f"engine_init_kwargs.{name}", "the installed vLLM has no such argument", hint)
    for name, value in (config.engine_init_kwargs.get("hf_overrides") or {}).items():
        # the table of rotary embeddings was compared before
        if name in overrides and name != "rope_parameters" and thaw(value) != overrides[name]:
            yield _problem(
                f"engine_init_kwargs.hf_overrides.{name}",
                f"{value} is not {overrides[name]}, which the learner's model has",
                "leave it out: engines get trainer.policy.model_config_kwargs",
            )


def _problem(field: str, message: str, hint: str) -> Problem:
    return Problem(path=f"{TABLE}.{field}", message=message, hint=hint)
