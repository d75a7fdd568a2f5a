"""The training service: the models of `ModelBank` learn, and engines sample from their snapshots.

clients -> TrainingService -> ServedModels -> BankRanks -> ModelBank, on a thread of this process or on ranks
                                           -> Samplers -> engines
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import cached_property, partial
from pathlib import Path

import torch
from attrs import asdict, evolve
from torch import Tensor

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.sizes import grid_of, sizes_of, starts_engines
from skyrl.config.settings.trackers import names_of
from skyrl.errors import Problem, ResumeError, Stopped
from skyrl.experiments.factories import NO_ADAPTERS, EngineAdapters, longest_sequence, start_processes
from skyrl.experiments.preflight import the_trackers_are_there
from skyrl.experiments.standalone import StandaloneSampling, model_checks
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.models.files.loading import load_causal_lm, load_config
from skyrl.models.files.naming import named_weights
from skyrl.planning.layout import layout
from skyrl.processes.handles import Group, Processes
from skyrl.processes.in_process import LocalHandle
from skyrl.runs.input_digests import TOKENIZER, model_digests, model_file_digests
from skyrl.runs.inputs import notice
from skyrl.runs.run_lock import SIGNATURE, RunLock, config_text
from skyrl.storage.atomic import write_file
from skyrl.tracking.factory import trackers_of
from skyrl.tracking.jsonlines import JsonLines, MetricsFile
from skyrl.tracking.service_status import SERVICE_STATUS, folder_of
from skyrl.tracking.tracker import Tracker, Trackers
from skyrl.training_service.backend import (
    AdamSettings,
    AdapterSpec,
    PassRequest,
    PassResult,
    SampleRequest,
    SampleResult,
    ServedModel,
)
from skyrl.training_service.executor import WEIGHTS
from skyrl.training_service.model_bank import BankRanks, ModelBank
from skyrl.training_service.model_queue import QueuedModel
from skyrl.training_service.records import ServiceRecords, StepLines
from skyrl.training_service.samplers import Samplers
from skyrl.training_service.service import ServiceStatus
from skyrl.training_service.serving import serving_training
from skyrl.tree import evolve_at
from skyrl.tree.files import stored_text
from skyrl.tree.rules import Check
from skyrl.weight_receiver.incoming_weights import SharedWeights

TOKENS_PER_PASS = 8192
"""Tokens that go through the model together, unless `trainer.max_tokens_per_microbatch` bounds them."""

BASE = "base.json"
"""File with the digests of the base model, which has to be the same when the service starts again."""

STATUS_SECONDS = 1.0
"""Seconds between two versions of the file that `skyrl watch` reads."""

_MODEL = "trainer.policy.model"


class ServedModels:
    """The `Backend` of a training service: what learns, and what samples."""

    def __init__(self, bank: BankRanks, samplers: Samplers, client: InferenceEngineClient, *, full: bool) -> None:
        self._bank, self._samplers, self._client, self._full = bank, samplers, client, full
        self._versions = 0

    async def create(self, model_id: str, spec: AdapterSpec | None) -> None:
        await self._bank.call(ModelBank.create, model_id, spec)

    async def passes(self, requests: Sequence[PassRequest]) -> Sequence[PassResult | Exception]:
        return await self._bank.passes(requests)

    async def optimizer_step(self, model_id: str, settings: AdamSettings) -> Mapping[str, float]:
        return await self._bank.call(ModelBank.optimizer_step, model_id, settings)

    async def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._bank.call(ModelBank.save, model_id, folder, optimizer=optimizer)

    async def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._bank.call(ModelBank.load, model_id, folder, optimizer=optimizer)

    async def unload(self, model_id: str) -> None:
        await self._bank.call(ModelBank.unload, model_id)

    async def publish(self, model_id: str, sampler: str) -> None:
        if self._full:
            await self._send(sampler, await self._bank.call(ModelBank.weights))
        else:
            await self._samplers.publish(sampler, await self._bank.call(ModelBank.adapter, model_id))

    async def publish_stored(self, folder: Path, sampler: str) -> None:
        if self._full:
            await self._send(sampler, await asyncio.to_thread(_stored_weights, folder))
        else:
            await self._samplers.publish_stored(sampler, folder)

    async def unpublish(self, sampler: str) -> None:
        await self._samplers.unpublish(sampler)

    async def sample(self, request: SampleRequest) -> SampleResult:
        return await self._samplers.sample(request)

    async def close(self) -> None:
        """Release the models that learn."""
        await self._bank.call(ModelBank.close)

    async def _send(self, sampler: str, weights: tuple[tuple[str, Tensor], ...]) -> None:
        """Make all weights of a model a sampler, in place of the one before."""

        async def transfer() -> None:
            self._versions += 1
            await self._client.pause()
            try:
                await self._client.load_weights([SharedWeights(weights)], self._versions)
            finally:
                await self._client.resume()

        await self._samplers.publish_weights(sampler, transfer)


def _stored_weights(folder: Path) -> tuple[tuple[str, Tensor], ...]:
    """Name and value of every weight of a stored model."""
    model = load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"), table=_MODEL)
    return tuple(named_weights(model))


class TrainingServiceExp(StandaloneSampling):
    """One training service. Single use."""

    def __init__(self, cfg: SkyRLTrainConfig, locations: Mapping[str, str]) -> None:
        """`cfg` is resolved and checked; `locations` says where its values were written."""
        settings = cfg.training_service
        published = EngineAdapters(at_once=settings.max_snapshots, rank=settings.max_rank)
        super().__init__(cfg, adapters=NO_ADAPTERS if settings.train_all_weights else published)
        self.locations = locations

    def serve(self, say: Callable[[str], None]) -> None:
        """Answer clients until a signal arrives; `say` is called with the address once the models are loaded.

        Raises `UserError` for a folder that another process uses, `ResumeError` for one that belongs to a service with
        another base model, and the errors of `serving_training`.
        """
        path = self.cfg.trainer.path_of("run_path")
        lock = RunLock(self.folder.path, path, self.cfg)
        lock.acquire()
        self.resources.callback(lock.release)
        self._refuse_another_base()
        lock.write_config(config_text(self.cfg, self.locations))
        with suppress(Stopped):  # the regular end of a service
            self.sample(partial(self.answer_clients, say))

    async def answer_clients(self, say: Callable[[str], None]) -> None:
        """Answer clients until the service fails or is cancelled, on the loop of the engines."""
        with self.progress.waiting_for("the model that learns"):
            bank = self.start_models()
        settings, base = self.cfg.training_service, self.served
        models = ServedModels(bank, self.samplers, self.client, full=base.full)
        kept = self.cfg.trainer.samples_per_step_kept
        records = ServiceRecords(self.open_tracker, self.folder.path, self.decode, samples_per_step=kept)
        try:
            async with serving_training(models, self.folder.path, settings, base, records) as served:
                say(f"{base.names[0]} at {served.url}")
                showing = asyncio.create_task(keep_status(served.status, self.folder.path))
                try:
                    await served.run()
                finally:
                    showing.cancel()
        finally:
            await asyncio.to_thread(records.close)
            await models.close()

    def admitting(self, engine: InferenceEngine) -> AbstractAsyncContextManager[None]:
        """The block in which a restarted engine gets the published adapters."""
        return self.samplers.admitting(engine)

    @cached_property
    def samplers(self) -> Samplers:
        """The published snapshots."""
        base, stored = self.served, self.folder.path / WEIGHTS
        return Samplers(self.client, max_model_len=base.context, vocabulary=base.vocabulary, snapshots=stored)

    def open_tracker(self, model: QueuedModel) -> Tracker:
        """The trackers of a model: a folder as a run has one, and those that the configuration names."""
        folder = folder_of(model.id, self.folder.path)
        folder.mkdir(parents=True, exist_ok=True)
        run = evolve_at(self.cfg, "trainer.run_path", str(folder))
        run = evolve_at(run, "trainer.run_name", f"{run.trainer.run_name}-{folder.name}")
        write_file(folder / SIGNATURE, config_text(run, self.locations))
        names = names_of(run.trainer.logger)
        others = evolve_at(run.trainer, "logger", tuple(name for name in names if name != "console"))
        console = [StepLines(model.id, notice)] if "console" in names else []
        named = trackers_of(others, total_steps=0, first_step=model.steps - 1, say=notice)
        return Trackers([MetricsFile(JsonLines(folder / "metrics.jsonl")), *console, *named])

    @cached_property
    def served(self) -> ServedModel:
        """The base model, as clients see it."""
        engine = self.cfg.generator.inference_engine
        config = load_config(self.model_path)
        return ServedModel(
            names=tuple(dict.fromkeys(filter(None, (engine.served_model_name, self.model_path)))),
            context=longest_sequence(self.cfg),
            vocabulary=int(config.get_text_config().vocab_size),
            tokenizer=engine.served_model_name or self.model_path,
            architecture=str(config.model_type),
            full=self.cfg.training_service.train_all_weights,
        )

    def get_processes(self) -> Processes:
        """Processes of the engines, and of the models that learn if they have several ranks."""
        if _ranks(self.cfg) == 1:
            return super().get_processes()
        sizes = sizes_of(self.cfg)
        models = {"policy": sizes.models["policy"]}
        return start_processes(
            self.cfg, layout(evolve(sizes, models=models, colocate_all=False, colocate_policy_ref=False))
        )

    def start_models(self) -> BankRanks:
        """The models that learn: in this process, or, with several ranks, each rank in a process of its own."""
        trainer, settings = self.cfg.trainer, self.cfg.training_service
        bound = trainer.max_tokens_per_microbatch
        make = partial(
            ModelBank,
            trainer,
            trainer.policy,
            tokens_per_pass=bound if bound > 0 else TOKENS_PER_PASS,
            full=settings.train_all_weights,
            resident=settings.resident_models,
            rest_in=self.folder.path,
        )
        count = _ranks(self.cfg)
        if count > 1:
            makers = [partial(make, ranks=ranks) for ranks in self.ranks_of("policy", count)]
            return BankRanks(self.processes.start("policy", makers))
        thread = ThreadPoolExecutor(1, thread_name_prefix="models")  # so that engines of this process sample meanwhile
        self.resources.callback(thread.shutdown)
        return BankRanks(Group([LocalHandle("models", make(), thread=thread)]))

    def _refuse_another_base(self) -> None:
        """Raises `ResumeError` if the base model is not the one that the stored models were trained on."""
        field = f"{_MODEL}.path"
        now = model_digests(field, self.cfg.trainer.policy.model, weights=True)
        now |= model_file_digests(field, self.cfg.trainer.tokenizer_path or self.model_path, TOKENIZER)
        file = self.folder.path / BASE
        before = json.loads(stored_text(file)) if file.exists() else now
        if changed := [name for name in now if before.get(name) != now[name]]:
            raise ResumeError(
                f"{self.folder.path} has models that were trained on another base model: {', '.join(changed)} changed. "
                f"Restore it, or choose another {self.cfg.trainer.path_of('run_path')}"
            )
        write_file(file, json.dumps(now, indent=1) + "\n")


async def keep_status(status: Callable[[], Awaitable[ServiceStatus]], folder: Path) -> None:
    """Keep the file that `skyrl watch` reads up to date."""
    while True:
        write_file(folder / SERVICE_STATUS, status_text(await status()))
        await asyncio.sleep(STATUS_SECONDS)


def status_text(status: ServiceStatus) -> str:
    """The content of the file that `skyrl watch` and `skyrl view` read."""
    return json.dumps({"time": time.time(), **asdict(status)}) + "\n"


def _ranks(run: SkyRLTrainConfig) -> int:
    """Number of ranks of the models that learn."""
    return grid_of(run, "policy").ranks


def ranks_share_sequences_alone(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Ranks share sequences and shards of the base, which has no adapter of the configuration's own."""
    ranks, lora = _ranks(run), run.trainer.policy.model.lora
    if ranks > 1 and run.training_service.train_all_weights:
        message = f"{ranks} ranks, but all weights of a model are trained by one"
        yield Problem(path="trainer.placement.policy_num_gpus_per_node", message=message, hint="set it to 1")
    for name in ("tensor_parallel_size", "sequence_parallel_size", "context_parallel_size", "expert_parallel_size"):
        size = getattr(run.trainer.policy, name)
        if size > 1:
            message = f"{size}, but ranks of a training service compute on different sequences, each with all layers"
            yield Problem(path=f"trainer.policy.{name}", message=message, hint="set it to 1")
    if lora.rank:
        message = f"{lora.rank}, but clients of a training service choose the ranks of their adapters"
        yield Problem(path=f"{_MODEL}.lora.rank", message=message, hint="leave it out")


def engines_take_snapshots(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines take the snapshots that clients publish."""
    engine, backend = run.generator.inference_engine, backend_of(run.generator.inference_engine)
    field = "generator.inference_engine.backend"
    if not (backend.serves_adapters and starts_engines(run)):
        message = f"{engine.backend}, but a training service publishes adapters while its own engines sample"
        yield Problem(path=field, message=message, hint="set it to torch or vllm")
    elif run.training_service.train_all_weights and not backend.is_embedded:
        message = f"{engine.backend}, but all weights of a model go to an engine of the same process"
        yield Problem(path=field, message=message, hint="set it to torch")
    elif engine.rollout_dtype == "int8":
        message = "int8, in which engines take no adapters"
        yield Problem(path="generator.inference_engine.rollout_dtype", message=message, hint="set it to bfloat16")


PREFLIGHT: tuple[Check[SkyRLTrainConfig], ...] = (
    *model_checks,
    the_trackers_are_there,
    ranks_share_sequences_alone,
    engines_take_snapshots,
)
"""Checks before a training service starts."""
