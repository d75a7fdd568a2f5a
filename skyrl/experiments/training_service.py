"""The training service: the models of `ModelBank` learn in this process, and engines sample from their snapshots.

clients -> TrainingService -> ServedModels -> ModelBank, on a thread of its own
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
from typing import ParamSpec, TypeVar

import torch
from attrs import asdict
from torch import Tensor

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.sizes import starts_engines
from skyrl.errors import Problem, ResumeError, Stopped
from skyrl.experiments.collaborators import NO_ADAPTERS, EngineAdapters, longest_sequence
from skyrl.experiments.standalone import StandaloneSampling, model_checks
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.models.files.loading import load_causal_lm, load_config
from skyrl.models.files.naming import named_weights
from skyrl.runs.read_again import TOKENIZER, model_digests, of_model
from skyrl.runs.run_lock import RunLock
from skyrl.storage.atomic import write_file
from skyrl.tracking.service_status import SERVICE_STATUS
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
from skyrl.training_service.model_bank import ModelBank
from skyrl.training_service.samplers import Samplers
from skyrl.training_service.service import ServiceStatus
from skyrl.training_service.serving import serving_training
from skyrl.tree.files import stored_text
from skyrl.tree.rules import Check
from skyrl.weight_receiver.incoming_weights import Shared

P = ParamSpec("P")
R = TypeVar("R")

TOKENS_PER_PASS = 8192
"""Tokens that go through the model together, unless `trainer.max_tokens_per_microbatch` bounds them."""

BASE = "base.json"
"""File with the digests of the base model, which has to be the same when the service starts again."""

STATUS_SECONDS = 1.0
"""Seconds between two versions of the file that `skyrl watch` reads."""

_MODEL = "trainer.policy.model"


class ServedModels:
    """The `Backend` of a training service: what learns, and what samples."""

    def __init__(self, bank: ModelBank, samplers: Samplers, client: InferenceEngineClient, *, full: bool) -> None:
        self._bank, self._samplers, self._client, self._full = bank, samplers, client, full
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._versions = 0

    async def create(self, model_id: str, spec: AdapterSpec | None) -> None:
        await self._learn(self._bank.create, model_id, spec)

    async def passes(self, requests: Sequence[PassRequest]) -> Sequence[PassResult | Exception]:
        return await self._learn(self._bank.passes, requests)

    async def optimizer_step(self, model_id: str, settings: AdamSettings) -> Mapping[str, float]:
        return await self._learn(self._bank.optimizer_step, model_id, settings)

    async def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._learn(self._bank.save, model_id, folder, optimizer=optimizer)

    async def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._learn(self._bank.load, model_id, folder, optimizer=optimizer)

    async def unload(self, model_id: str) -> None:
        await self._learn(self._bank.unload, model_id)

    async def publish(self, model_id: str, sampler: str) -> None:
        if self._full:
            await self._send(sampler, await self._learn(self._bank.weights))
        else:
            await self._samplers.publish(sampler, await self._learn(self._bank.adapter, model_id))

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
        await self._learn(self._bank.close)
        self._thread.shutdown()

    async def _learn(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """A call of the bank, on its own thread, so that engines of this process sample meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))

    async def _send(self, sampler: str, weights: tuple[tuple[str, Tensor], ...]) -> None:
        """Make all weights of a model a sampler, in place of the one before."""

        async def transfer() -> None:
            self._versions += 1
            await self._client.pause()
            try:
                await self._client.load_weights([Shared(weights)], self._versions)
            finally:
                await self._client.resume()

        await self._samplers.publish_weights(sampler, transfer)


def _stored_weights(folder: Path) -> tuple[tuple[str, Tensor], ...]:
    """Name and value of every weight of a stored model."""
    model = load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"), table=_MODEL)
    return tuple(named_weights(model))


class TrainingServiceExp(StandaloneSampling):
    """One training service. Single use."""

    def __init__(self, cfg: SkyRLTrainConfig, places: Mapping[str, str]) -> None:
        """`cfg` is resolved and checked; `places` says where its values were written."""
        settings = cfg.training_service
        published = EngineAdapters(at_once=settings.max_snapshots, rank=settings.max_rank)
        super().__init__(cfg, adapters=NO_ADAPTERS if settings.train_all_weights else published)
        self.places = places

    def serve(self, say: Callable[[str], None]) -> None:
        """Answer clients until a signal arrives; `say` is called with the address once the models are loaded.

        Raises `UserError` for a folder that another process uses, `ResumeError` for one that belongs to a service with
        another base model, and the errors of `serving_training`.
        """
        path = self.cfg.trainer.path_of("run_path")
        lock = RunLock(self.folder.path, path, self.cfg, self.places)
        lock.acquire()
        self.held.callback(lock.release)
        self._refuse_another_base()
        lock.write_config()
        with suppress(Stopped):  # the regular end of a service
            self.sample(partial(self.answer_clients, say))

    async def answer_clients(self, say: Callable[[str], None]) -> None:
        """Answer clients until the service fails or is cancelled, on the loop of the engines."""
        with self.progress.waiting_for("the model that learns"):
            bank = self._bank()
        settings, base = self.cfg.training_service, self.served
        models = ServedModels(bank, self.samplers, self.client, full=base.full)
        try:
            async with serving_training(models, self.folder.path, settings, base) as served:
                say(f"{base.names[0]} at {served.url}")
                showing = asyncio.create_task(keep_status(served.status, self.folder.path))
                try:
                    await served.run()
                finally:
                    showing.cancel()
        finally:
            await models.close()

    def admitting(self, engine: InferenceEngine) -> AbstractAsyncContextManager[None]:
        """The block in which a restarted engine gets the published adapters."""
        return self.samplers.admitting(engine)

    @cached_property
    def samplers(self) -> Samplers:
        """The published snapshots."""
        base, stored = self.served, self.folder.path / WEIGHTS
        return Samplers(self.client, max_model_len=base.context, vocabulary=base.vocabulary, snapshots=stored)

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

    def _bank(self) -> ModelBank:
        trainer, settings = self.cfg.trainer, self.cfg.training_service
        bound = trainer.max_tokens_per_microbatch
        return ModelBank(
            trainer,
            trainer.policy,
            tokens_per_pass=bound if bound > 0 else TOKENS_PER_PASS,
            full=settings.train_all_weights,
            resident=settings.resident_models,
            rest_in=self.folder.path,
        )

    def _refuse_another_base(self) -> None:
        """Raises `ResumeError` if the base model is not the one that the stored models were trained on."""
        field = f"{_MODEL}.path"
        now = model_digests(field, self.cfg.trainer.policy.model, weights=True)
        now |= of_model(field, self.cfg.trainer.tokenizer_path or self.model_path, TOKENIZER)
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
        write_file(folder / SERVICE_STATUS, json.dumps({"time": time.time(), **asdict(await status())}) + "\n")
        await asyncio.sleep(STATUS_SECONDS)


def learns_in_one_process(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The models that learn are in the process of the command, without an adapter of the configuration's own."""
    placement, lora = run.trainer.placement, run.trainer.policy.model.lora
    ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    if ranks > 1:
        message = f"{ranks} ranks, but the models of a training service learn in one process"
        yield Problem(path="trainer.placement.policy_num_gpus_per_node", message=message, hint="set it to 1")
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


PREFLIGHT: tuple[Check[SkyRLTrainConfig], ...] = (*model_checks, learns_in_one_process, engines_take_snapshots)
"""Checks before a training service starts."""
