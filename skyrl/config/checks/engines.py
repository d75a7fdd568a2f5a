"""Checks of engines: their settings work on the run's device, and weights can reach them.

Only checks of the tree alone are here. Anything that depends on the model or the installed engine is checked when a run
starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from skyrl.config.checks import warning
from skyrl.config.checks.asynchronous import is_corrected
from skyrl.config.derive.engine_backends import GROUP_TRANSPORTS, backend_of, backends_that, engine_dtype, server_urls
from skyrl.config.derive.engine_options import refused_options
from skyrl.config.derive.sizes import draws_rollouts, on_ray, starts_engines
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem

_ENGINE = "generator.inference_engine"

_THIS_MACHINE = re.compile(r"http://(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:|/|$)")
"""Addresses that no other machine can listen to."""


def nccl_needs_cuda(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """NCCL transfers GPU memory, so it needs CUDA. Within one process nothing travels, so any transport is accepted."""
    if on_ray(run) and run.trainer.device == "cpu" and run.generator.inference_engine.weight_sync_backend == "nccl":
        yield Problem(
            path=f"{_ENGINE}.weight_sync_backend",
            message="nccl sends GPU memory, but trainer.device is cpu",
            hint="leave it out: it is derived; on a CPU, gloo and disk run. To check for a machine with GPUs, set "
            "trainer.device = cuda",
        )


def nccl_needs_engine_support(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """NCCL transfers need an engine that implements them."""
    engine = run.generator.inference_engine
    able, transport = backend_of(engine), engine.weight_sync_backend
    on_gpus = on_ray(run) and run.trainer.device != "cpu" and able.is_started_by_the_run
    if on_gpus and transport == "nccl" and transport not in able.transports:
        others = backends_that(lambda backend: "nccl" in backend.transports)
        yield Problem(
            path=f"{_ENGINE}.weight_sync_backend",
            message=f"nccl transfers weights to {others} engines only, but backend is {engine.backend}",
            hint=f"leave it out: it is derived; {' and '.join(able.transports)} work with it",
        )


def servers_support_weight_transport(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Running servers take weights only through the routes they have. Transports with a process group also need a
    learner on Ray: one in the driver's process would block in the group before it can ask the servers to join.
    """
    engine = run.generator.inference_engine
    able = backend_of(engine).transports
    choices = (*(transport for transport in able if on_ray(run) or transport not in GROUP_TRANSPORTS), "none")
    travels = on_ray(run) and engine.weight_sync_backend != "nccl"  # else the check of nccl says more
    if draws_rollouts(run) and (travels or not starts_engines(run)) and engine.weight_sync_backend not in choices:
        known = engine.weight_sync_backend in able
        of_ray = " from a learner that is not on Ray" if known else ""
        or_ray = ", or set trainer.placement.executor = ray" if known else ""
        them = f"engines of the kind {engine.backend}" if starts_engines(run) else "engines that are already running"
        yield Problem(
            path=f"{_ENGINE}.weight_sync_backend",
            message=f"{engine.weight_sync_backend} does not reach {them}{of_ray}",
            hint=f"leave it out: it is derived; possible values: {', '.join(choices)}{or_ray}",
        )


def object_store_needs_delta_transport(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines can fetch the files of `delta` from an object store, but open those of `disk` in the learner's folder."""
    engine = run.generator.inference_engine
    if engine.weight_sync_path and "://" in engine.weight_sync_path and engine.weight_sync_backend == "disk":
        message = "weight_sync_backend = disk writes to a folder that all machines see, and not to an object store"
        hint = f"set {_ENGINE}.weight_sync_backend = delta, or give a folder"
        yield Problem(path=f"{_ENGINE}.weight_sync_path", message=message, hint=hint)


def started_engines_get_weights(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines that the run starts need its weights; only servers can have their own."""
    if starts_engines(run) and run.generator.inference_engine.weight_sync_backend == "none":
        message = "none is for engines that are already running, but this run starts its own"
        yield Problem(path=f"{_ENGINE}.weight_sync_backend", message=message, hint="leave it out: it is derived")


def external_token_needs_https(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """HTTP without TLS sends `external_token` unencrypted."""
    engine = run.generator.inference_engine
    urls = (*server_urls(engine), *filter(None, [engine.external_proxy_url]))
    open_ones = [url for url in urls if url.startswith("http:") and not _THIS_MACHINE.match(url)]
    if engine.external_token is not None and not starts_engines(run) and open_ones:
        yield warning(
            path=f"{_ENGINE}.external_token",
            message=f"is sent to {open_ones[0]} without encryption",
            hint="serve the engines over https, or use a private network",
        )


def engine_options_have_no_field(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A setting that has a field is not set again in `engine_init_kwargs` under the engine's name for it."""
    if _reads(run, "engine_init_kwargs"):
        yield from refused_options(run.generator.inference_engine)


def vllm_on_cpu_is_eager(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """CUDA graphs need CUDA, so vLLM on a CPU needs `enforce_eager`."""
    on_a_cpu = run.trainer.device == "cpu" and _reads(run, "enforce_eager")
    if on_a_cpu and not run.generator.inference_engine.enforce_eager:
        message = "a CPU has no CUDA graphs"
        yield Problem(path=f"{_ENGINE}.enforce_eager", message=message, hint="set it to true")


def vllm_cpu_is_not_deterministic(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """vLLM's batch-invariant kernels need CUDA, so it is not deterministic on a CPU."""
    engine = run.generator.inference_engine
    able = backend_of(engine)
    needs_cuda = able.is_started_by_the_run and not able.repeats_on_a_cpu
    if run.trainer.device == "cpu" and needs_cuda and engine.deterministic:
        others = backends_that(lambda backend: backend.repeats_on_a_cpu)
        yield Problem(
            path=f"{_ENGINE}.deterministic",
            message=f"the batch-invariant kernels of {engine.backend} need CUDA, and trainer.device is cpu",
            hint=f"set {_ENGINE}.backend = {others}, which is deterministic on a CPU, or this to false: it follows "
            "trainer.deterministic",
        )


def cpu_engine_uses_child_processes(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """On a CPU, vLLM can split an engine over child processes only."""
    engine = run.generator.inference_engine
    parts = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    splits = _reads(run, "distributed_executor_backend") and run.trainer.device == "cpu"
    if splits and parts > 1 and engine.distributed_executor_backend == "ray":
        yield Problem(
            path=f"{_ENGINE}.distributed_executor_backend",
            message=f"on a CPU the {parts} parts of an engine are child processes",
            hint="set it to mp",
        )


def engine_replicas_need_async_engine(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """vLLM's offline engine holds one copy of the weights, so `data_parallel_size` above 1 needs `async_engine`."""
    engine = run.generator.inference_engine
    if _reads(run, "async_engine") and not engine.async_engine and engine.data_parallel_size > 1:
        yield Problem(
            path=f"{_ENGINE}.data_parallel_size",
            message=f"{engine.data_parallel_size} copies of the weights are set, but vLLM's offline engine holds one",
            hint=f"set {_ENGINE}.async_engine = true, or {_ENGINE}.num_engines to the number of copies",
        )


def statistics_need_async_engine(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Statistics need `async_engine`: vLLM's offline engine exports none."""
    engine = run.generator.inference_engine
    if _reads(run, "async_engine") and not engine.async_engine and engine.enable_ray_prometheus_stats:
        yield Problem(
            path=f"{_ENGINE}.enable_ray_prometheus_stats",
            message="vLLM's offline engine exports no statistics",
            hint=f"set {_ENGINE}.async_engine = true",
        )


def token_budget_covers_sequences(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each sequence that runs takes at least one of the tokens that a step of vLLM computes."""
    engine = run.generator.inference_engine
    if _reads(run, "max_num_batched_tokens") and engine.max_num_batched_tokens < engine.max_num_seqs:
        yield Problem(
            path=f"{_ENGINE}.max_num_batched_tokens",
            message=f"{engine.max_num_batched_tokens} tokens in a step are fewer than {_ENGINE}.max_num_seqs = "
            f"{engine.max_num_seqs}",
            hint=f"raise it to {engine.max_num_seqs} or more, or lower max_num_seqs",
        )


def quantized_samples_are_corrected(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Rounding of the engine's weights distorts importance ratios; truncated importance sampling bounds the effect."""
    learners, engine = run.trainer.compute_dtype, run.generator.inference_engine
    if learners is None or not _reads(run, "rollout_dtype") or is_corrected(run):
        return
    rounded = engine_dtype(engine, learners)
    if rounded != learners:
        yield warning(
            path=f"{_ENGINE}.rollout_dtype",
            message=f"samples are drawn in {rounded} and learned from in {learners}, and nothing in the loss corrects "
            "for the difference",
            hint='set trainer.algorithm.off_policy_correction.tis_ratio_type = "token"',
        )


def int8_needs_cpu(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """int8 computes with oneDNN's kernels, which are used on a CPU only."""
    engine = run.generator.inference_engine
    if _reads(run, "rollout_dtype") and engine.rollout_dtype == "int8" and run.trainer.device != "cpu":
        yield Problem(
            path=f"{_ENGINE}.rollout_dtype",
            message=f"int8 works on a CPU only, and trainer.device is {run.trainer.device}",
            hint='take "bfloat16"',
        )


def num_engines_is_within_bounds(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`num_engines` lies between `min_engines` and `max_engines`."""
    engine = run.generator.inference_engine
    if engine.min_engines > engine.num_engines:
        message = f"{engine.min_engines} is more than num_engines = {engine.num_engines}"
        yield Problem(path="generator.inference_engine.min_engines", message=message, hint="lower it")
    if engine.max_engines is not None and engine.max_engines < engine.num_engines:
        message = f"{engine.max_engines} is less than num_engines = {engine.num_engines}"
        yield Problem(path="generator.inference_engine.max_engines", message=message, hint="raise it, or leave it out")


def _reads(run: SkyRLTrainConfig, field: str) -> bool:
    return field in backend_of(run.generator.inference_engine).fields
