"""Builds processes, engines, weight transports and served teachers from the configuration.

Nothing is started for servers that run already: their engines are objects of this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve, frozen

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import BACKENDS, backend_of, engine_dtype, server_urls, weight_dtype
from skyrl.config.derive.engine_options import given_length
from skyrl.config.derive.model_overrides import engine_overrides
from skyrl.config.derive.sizes import (
    engines_of,
    grid_of,
    joins_servers,
    may_change_engines,
    may_restart_engines,
    most_engines,
    on_ray,
    sends_adapter_files,
    sends_adapters_alone,
    sizes_of,
    starts_engines,
    workers_of_an_engine,
)
from skyrl.config.foundation.import_paths import load_builtin
from skyrl.config.loading.kinds import kind_of, samples_rollouts
from skyrl.config.settings.distillation import TeacherServerConfig
from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.errors import ConfigError, Problem, ProcessError, UserError
from skyrl.inference.engine import InferenceEngine, InFlight
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.pool.engine_proxy import EngineProxy
from skyrl.inference.pool.restarts import EngineRestarts
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.scoring_server import TOKEN_VARIABLE, ScoringServer
from skyrl.inference.servers.server_api import ServerApi, ServerDeadlines
from skyrl.inference.servers.sglang_engine import SGLangEngine
from skyrl.inference.torch.engine import load_torch_engine
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.installation import install_command
from skyrl.learners.ranks import Rendezvous
from skyrl.learners.workers.model_worker import required_device
from skyrl.models.files.loading import load_tokenizer, max_positions
from skyrl.planning.layout import Layout, layout, layout_of_engine
from skyrl.processes.credentials import api_key
from skyrl.processes.event_loop import run_in_daemon_thread
from skyrl.processes.handles import Deadlines, Processes
from skyrl.processes.in_process import InProcess
from skyrl.processes.naming.stores import awaited
from skyrl.processes.torch_environment import TORCH_ENVIRONMENT
from skyrl.rollout.stream import StreamLimits
from skyrl.runs.engine_changes import EngineChanges
from skyrl.runs.inputs import compare_served_tokens
from skyrl.runs.run_tree import AnyRun
from skyrl.storage.places import is_address
from skyrl.training.middleware import RolloutParity
from skyrl.training.teacher import ServedTeacher
from skyrl.tree import FrozenDict, required
from skyrl.weight_sync.canary import NEW_TOKENS, Canary, canary_prompts
from skyrl.weight_sync.transports import (
    ADAPTER_DTYPE,
    BroadcastTransport,
    DeltaTransport,
    FolderTransport,
    SGLangGroupTransport,
    SharedTransport,
    TransferRendezvous,
    VLLMNativeTransport,
    WeightTransport,
)

LOOPBACK: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo"}
"""Address for ranks on one machine, which no other machine can reach."""


def start_processes(run: AnyRun, seats: Layout | None = None, *, retry: bool = False) -> Processes:
    """The executor of `placement.executor`; with `ray`, its cluster is ready when this returns. `seats` is the layout
    of all processes; None: that of a training run. `retry` is true if this command's own run has failed; the executor
    may then wait for machines.
    """
    placement, faults = run.trainer.placement, run.trainer.faults
    if placement.executor == "in_process":
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        return InProcess()
    try:
        from skyrl.processes.ray.processes import RayProcesses
    except ModuleNotFoundError as error:
        field = run.trainer.path_of("placement.executor")
        raise UserError(f"{field} = ray needs {error.name}: {install_command('ray')}") from error

    device = required_device(run.trainer)
    spare = 0  # places for processes of engines that may be added
    if device == "cpu" and samples_rollouts(run) and (engines := engines_of(run)) is not None:
        spare = (most_engines(run) - engines.number) * engines.gpus
    return RayProcesses(
        seats or layout(kind_of(run).sizes(run)),
        deadlines=Deadlines(
            room=faults.lost_rank_timeout_seconds if retry and faults.on_lost_rank == "wait" else 0.0,
            start=placement.start_timeout_seconds,
            call=placement.call_timeout_seconds,
            heartbeat=placement.heartbeat_timeout_seconds,
        ),
        address=placement.ray_address,
        address_field=run.trainer.path_of("placement.ray_address"),
        logs=Path(run.trainer.folder("log_path")).expanduser().absolute(),
        environment=TORCH_ENVIRONMENT if placement.ray_address else {**TORCH_ENVIRONMENT, **LOOPBACK},
        device=device,
        spare=spare,
    )


@frozen
class EngineAdapters:
    """Adapters of other policies on the same base, which engines serve beside it."""

    stored: Mapping[str, str] = FrozenDict()
    """Name that requests use -> folder of the adapter."""

    at_once: int = 0
    """Number of those that are published later and in memory at the same time."""

    rank: int = 0
    """Largest rank of those."""


NO_ADAPTERS = EngineAdapters()
"""Engines that serve their policy alone."""


def engine_makers(run: SkyRLTrainConfig, adapters: EngineAdapters = NO_ADAPTERS) -> list[Callable[[], InferenceEngine]]:
    """One function for each engine, which makes the engine in the process that calls it."""
    engine = run.generator.inference_engine
    engine_maker = BACKENDS[engine.backend].engine_maker
    if not engine_maker:
        path = "generator.inference_engine.backend"
        raise ConfigError([Problem(path=path, message=f"no engine {engine.backend!r}")])
    make: Callable[[], InferenceEngine] = load_builtin(engine_maker)(run, adapters)
    return [make] * engine.num_engines


def torch_maker(run: SkyRLTrainConfig, adapters: EngineAdapters) -> Callable[[], InferenceEngine]:
    """Maker of the embedded engine."""
    trainer, engine = run.trainer, run.generator.inference_engine
    return partial(
        load_torch_engine,
        required(trainer.policy.model.path, "trainer.policy.model.path"),
        dtype=engine_dtype(engine, required(trainer.compute_dtype, "trainer.compute_dtype")),
        attention=required(trainer.attention, "trainer.attention"),
        device=required_device(trainer),
        float32_head=trainer.fp32_lm_head,
        use_fast_tokenizer=not trainer.disable_fast_tokenizer,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=longest_sequence(run),
        deterministic=required(engine.deterministic, "generator.inference_engine.deterministic"),
        prefix_caching=engine.enable_prefix_caching,
        several_turns=run.generator.max_turns > 1 or run.environment.agent.plays,
        overrides=engine_overrides(run),
        init_seed=trainer.seed if trainer.policy.model.init_from_scratch else None,
        tokenizer_path=trainer.tokenizer_path,
        returns_experts=engine.enable_return_routed_experts,
        adapters=adapters.stored,
        max_adapters=adapters.at_once,
    )


def vllm_maker(run: SkyRLTrainConfig, adapters: EngineAdapters) -> Callable[[], InferenceEngine]:
    """Maker of a vLLM engine."""
    trainer, engine = run.trainer, run.generator.inference_engine
    overrides = {**(engine.engine_init_kwargs.get("hf_overrides") or {}), "head_dtype": "float32"}
    return partial(
        VLLMEngine,
        _add_engine_options(engine, hf_overrides=overrides) if trainer.fp32_lm_head else engine,
        model_path=required(trainer.policy.model.path, "trainer.policy.model.path"),
        device=required_device(trainer),
        seed=trainer.seed,
        max_model_len=longest_sequence(run),
        overrides=engine_overrides(run),
        stored_weights=not trainer.policy.model.init_from_scratch,
        lora_rank=trainer.policy.model.lora.rank if sends_adapters_alone(run) else 0,
        tokenizer_path=trainer.tokenizer_path,
        adapters=adapters.stored,
        max_adapters=adapters.at_once,
        max_adapter_rank=adapters.rank,
    )


def sglang_maker(run: SkyRLTrainConfig, adapters: EngineAdapters) -> Callable[[], InferenceEngine]:
    """Maker of an SGLang server, which takes no adapters of other policies."""
    trainer, engine = run.trainer, run.generator.inference_engine
    return partial(
        SGLangEngine,
        _add_engine_options(engine, enable_fp32_lm_head=True) if trainer.fp32_lm_head else engine,
        model_path=required(trainer.policy.model.path, "trainer.policy.model.path"),
        device=required_device(trainer),
        log=Path(trainer.log_path).expanduser().absolute(),
        seed=trainer.seed,
        max_model_len=longest_sequence(run),
        deadlines=server_deadlines(run),
        overrides=engine_overrides(run),
        tokenizer_path=trainer.tokenizer_path,
        lora_rank=trainer.policy.model.lora.rank if sends_adapters_alone(run) else 0,
    )


def _add_engine_options(engine: InferenceEngineConfig, **options: object) -> InferenceEngineConfig:
    return evolve(engine, engine_init_kwargs={**engine.engine_init_kwargs, **options})


def engine_restarts(
    run: SkyRLTrainConfig,
    processes: Processes,
    engines_at_first: Sequence[InferenceEngine] = (),
    adapters: EngineAdapters = NO_ADAPTERS,
) -> EngineRestarts | None:
    """Starts engines while the run continues, to replace dead ones or add new ones. None if the run allows neither.
    `engines_at_first` are those that the run has: servers among them are asked again. `adapters` are those of
    `engine_makers`.
    """
    engine = run.generator.inference_engine
    most = engine.max_engine_restarts if may_restart_engines(run) else 0
    if not (most or may_change_engines(run)):
        return None
    if not starts_engines(run):
        return _servers_again(engines_at_first, most=most, backoff=engine.engine_restart_backoff_seconds)
    maker = engine_makers(run, adapters)[0]
    engines, per_node = required(engines_of(run), "engines"), sizes_of(run).gpus_per_node
    placed = set(range(engines.number))

    async def start(number: int) -> InferenceEngine:
        if number in placed:
            return EngineProxy(await run_in_daemon_thread(partial(processes.restart, "engine", number, maker)))
        seat = layout_of_engine(engines, number, per_node)
        proxy = EngineProxy(await run_in_daemon_thread(partial(processes.add, seat, maker)))
        placed.add(number)
        return proxy

    return EngineRestarts(start, most=most, backoff=engine.engine_restart_backoff_seconds)


def _servers_again(engines: Sequence[InferenceEngine], *, most: int, backoff: float) -> EngineRestarts:

    async def start(number: int) -> InferenceEngine:
        engine = engines[number]
        if not isinstance(engine, HttpEngine):
            raise ProcessError("it is not a server that can be asked again")
        await engine.rejoin()
        return engine

    return EngineRestarts(start, most=most, backoff=backoff, of_others=True)


def engine_changes(
    run: SkyRLTrainConfig, client: InferenceEngineClient, processes: Processes, folder: Path
) -> EngineChanges | None:
    """Adds and drains engines on requests in the run's folder; None if the run's engines cannot change."""
    if not may_change_engines(run):
        return None
    least = run.generator.inference_engine.min_engines
    remove = partial(processes.remove, "engine")
    return EngineChanges(folder, client, least=least, most=most_engines(run), remove=remove)


def in_flight_policy(run: SkyRLTrainConfig) -> InFlight:
    """Policy for samples that are being drawn when new weights arrive."""
    settings = run.trainer.fully_async
    if not (settings.enabled and settings.interrupt_generation):
        return "finish"
    return "recompute" if settings.clear_kv_cache_on_weight_sync else "keep"


def stream_limits(run: SkyRLTrainConfig, steps: int) -> StreamLimits:
    """Limits on how far sampling runs ahead of a training of `steps` steps."""
    settings, batch = run.trainer.fully_async, run.trainer.train_batch_size
    ahead = (settings.max_staleness_steps + 1) * batch
    return StreamLimits(
        batch=batch,
        staleness=settings.max_staleness_steps,
        concurrency=settings.num_parallel_generation_workers,
        queue=ahead if settings.queue_size is None else settings.queue_size,
        total=steps * batch,
        stall_seconds=settings.stall_timeout_seconds,
    )


def weight_transport(run: SkyRLTrainConfig, rendezvous: Rendezvous, folder: Path) -> WeightTransport:
    """The weight transport: weights are shared within one process, otherwise `weight_sync_backend` selects it."""
    engine = run.generator.inference_engine
    dtype = weight_dtype(engine, required(run.trainer.compute_dtype, "trainer.compute_dtype"))
    where: Path | str = folder
    if (path := engine.weight_sync_path) is not None:
        where = path if is_address(path) else Path(path).expanduser().absolute()
    if sends_adapters_alone(run):
        lora = run.trainer.policy.model.lora
        if sends_adapter_files(run):
            return FolderTransport(Path(lora.lora_sync_path).expanduser().absolute(), dtype=ADAPTER_DTYPE, lora=lora)
        if on_ray(run):
            return BroadcastTransport(_transfer_rendezvous(run, rendezvous), dtype=ADAPTER_DTYPE, lora=lora)
        return SharedTransport(lora)
    if not (starts_engines(run) or joins_servers(run)):
        return _file_transport(engine.weight_sync_backend, where, dtype)
    if run.trainer.placement.executor == "in_process":
        in_child_process = "async_engine" in backend_of(engine).fields and engine.async_engine
        return FolderTransport(folder, dtype=dtype) if in_child_process else SharedTransport()
    match engine.weight_sync_backend:
        case "disk" | "delta" as files:
            return _file_transport(files, where, dtype)
        case "nccl" | "gloo" as backend if BACKENDS[engine.backend].joins_update_groups:
            workers, transfer_rendezvous = workers_of_an_engine(run), _transfer_rendezvous(run, rendezvous, workers=1)
            return SGLangGroupTransport(transfer_rendezvous, backend=backend, workers=workers, dtype=dtype)
        case "nccl":
            together = run.trainer.placement.colocate_all  # one GPU cannot be two members of an NCCL group
            return VLLMNativeTransport(
                _transfer_rendezvous(run, rendezvous),
                backend="ipc" if together else "nccl",
                senders=grid_of(run, "policy").ranks if together else 1,
                dtype=dtype,
                bucket_bytes=int(engine.weight_transfer_threshold_cuda_ipc_GB * 1e9),
            )
        case _:
            return BroadcastTransport(_transfer_rendezvous(run, rendezvous), dtype=dtype)


def _file_transport(backend: str, where: Path | str, dtype: str) -> WeightTransport:
    if backend == "delta":
        return DeltaTransport(where, dtype=dtype)
    return FolderTransport(Path(where).absolute(), dtype=dtype)


def _transfer_rendezvous(
    run: SkyRLTrainConfig, rendezvous: Rendezvous, *, workers: int | None = None
) -> TransferRendezvous:
    """The rendezvous of a weight transfer. `workers` is the number of workers of each engine that join; None: all."""
    host, port = rendezvous.address
    timeout = run.trainer.placement.call_timeout_seconds
    return TransferRendezvous(host, port, workers=workers or workers_of_an_engine(run), timeout=timeout)


def parity_canary(run: SkyRLTrainConfig, prompts: Iterable[Sequence[int]]) -> Canary:
    """The log-probability parity canary: the run's own prompts, and answers that begin as its own do."""
    engine, longest = run.generator.inference_engine, longest_sequence(run)
    new = min(run.generator.sampling_params.max_generate_length, NEW_TOKENS)
    return Canary(
        prompts=canary_prompts(prompts, longest=max(1, longest - new)),
        new_tokens=new,
        temperature=required(run.trainer.algorithm.temperature, "trainer.algorithm.temperature"),
        bound=required(engine.logprob_parity_bound, "generator.inference_engine.logprob_parity_bound"),
    )


def rollout_parity(run: SkyRLTrainConfig) -> RolloutParity:
    """The comparison of engines and learner on samples, where the learner scores these as engines draw them: without
    dropout, and without changes to the logits that it does not apply.
    """
    drawn, policy = run.generator.sampling_params, run.trainer.policy
    drops = policy.use_dropout or (policy.model.lora.rank > 0 and policy.model.lora.dropout > 0)
    changed = drawn.repetition_penalty != 1 or drawn.frequency_penalty != 0 or drawn.min_new_tokens > 0
    hotter = drawn.temperature != run.trainer.algorithm.temperature
    other = hotter or bool(drawn.additional_kwargs) or run.environment.agent.plays  # an agent sets its own
    return RolloutParity(None if drops or changed or other else run.generator.inference_engine.logprob_parity_bound)


def longest_sequence(run: SkyRLTrainConfig) -> int:
    """Tokens in an engine's longest sequence: the length in its own options, or else the longest row of the run, at
    most the positions of the model.
    """
    if length := given_length(run.generator.inference_engine):
        return length
    path = required(run.trainer.policy.model.path, "trainer.policy.model.path")
    longest_row = required(run.trainer.longest_row, "trainer.longest_row")
    return min(longest_row, max_positions(path, engine_overrides(run)) or longest_row)


def server_engines(run: SkyRLTrainConfig, *, takes_weights: bool, needed: int = 0) -> list[InferenceEngine]:
    """One engine for each server. Without `takes_weights`, the server samples with the weights that it has. `needed` is
    the number of tokens of the run's longest sequence.
    """
    engine, deadlines = run.generator.inference_engine, server_deadlines(run)
    path = required(run.trainer.policy.model.path, "trainer.policy.model.path")
    tokenizer = load_tokenizer(run.trainer.tokenizer_path or path, use_fast=not run.trainer.disable_fast_tokenizer)
    router, urls = _addresses(engine, deadlines.start)
    return [
        HttpEngine(
            server_api(engine, url, router, deadlines, workers_of_an_engine(run) if joins_servers(run) else None),
            model_path=path,
            heartbeat=deadlines.heartbeat,
            needed=needed,
            tokenizer=tokenizer,
            overrides=engine_overrides(run),
            takes_weights=takes_weights,
            served_model_name=engine.served_model_name,
        )
        for url in urls or (required(router, "generator.inference_engine.external_proxy_url"),)
    ]


def server_deadlines(run: SkyRLTrainConfig) -> ServerDeadlines:
    """Deadlines of calls to a server."""
    placement = run.trainer.placement
    return ServerDeadlines(
        start=placement.start_timeout_seconds,
        call=placement.call_timeout_seconds,
        heartbeat=placement.heartbeat_timeout_seconds,
    )


def _addresses(engine: InferenceEngineConfig, seconds: float) -> tuple[str | None, list[str]]:
    """The address of the router, if there is one, and those of the engines. Names are looked up, waiting until they are
    published.

    Raises `UserError` if two of them lead to the same engine, which would get the weights of both.
    """
    deadline = time.monotonic() + seconds

    def resolve(url: str) -> str:
        return awaited(url, max(0.0, deadline - time.monotonic()))

    router = None if engine.external_proxy_url is None else resolve(engine.external_proxy_url)
    urls = [resolve(url) for url in server_urls(engine)]
    for url in urls:
        named = [name for name, at in zip(server_urls(engine), urls, strict=True) if at == url]
        if len(named) > 1:
            raise UserError(
                f"{' and '.join(named)} are the same engine, at {url}, but each gets weights of its own: list it once"
            )
    return router, urls


def server_api(
    engine: InferenceEngineConfig, url: str, router: str | None, deadlines: ServerDeadlines, workers: int | None
) -> ServerApi:
    """The API of the engine at `url`, whose samples are drawn through `router`, if there is one. `workers` is the
    number of its workers that join a group to receive weights, None if weights come as files.
    """
    token = None if engine.external_token is None else api_key(engine.external_token.name)
    samples = Connection(router or url, token=token, most=engine.max_num_seqs)
    control = Connection(url, token=token, most=8)  # a separate one: a command does not wait behind samples
    server_class: type[ServerApi] = load_builtin(backend_of(engine).server_api)
    return server_class.of_engine(engine, samples, control, deadlines, workers)


def served_teacher(endpoint: TeacherServerConfig, url: str) -> ServedTeacher:
    """The teacher behind the server at `url`, not connected yet."""
    token = os.environ.get(TOKEN_VARIABLE)
    limit, most = endpoint.timeout, endpoint.max_requests
    return ServedTeacher(ScoringServer(url, protocol=endpoint.protocol, token=token, timeout=limit, most=most))


async def connect_teachers(
    teachers: Collection[ServedTeacher],
    tokenizer: ChatTokenizer,
    policy: str,
    *,
    longest: int,
    top: int,
    address: str,
    length: str,
) -> None:
    """Ask each server for its limits, and compare its tokens with those of `policy`. Messages name the fields of
    their `address` and of the largest `length` of a row.

    Raises `UserError`, `ModelError` or `ProcessError` if one does not answer, takes fewer than `longest` tokens,
    reports fewer than `top` log-probabilities, or has other tokens.
    """
    try:
        for teacher in teachers:
            model = await teacher.server.connect(longest=longest, top=top, address=address, length=length)
            compare_served_tokens(tokenizer, model.path, teacher.server.url, policy)
    except BaseException:
        await close_teachers(teachers)  # a run that does not begin is not closed
        raise


async def close_teachers(teachers: Collection[ServedTeacher]) -> None:
    """Close the connections to the servers."""
    for teacher in teachers:
        await teacher.server.close()
