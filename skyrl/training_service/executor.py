"""Executes requests of models on the backend, and keeps what they did: results, ticks, checkpoints, stored states.

A request is executed first and recorded afterwards, with its result, in one transaction. A service that is killed in
between starts from the stored state and the recorded ticks, and executes the request again: from the same weights, so
that whoever waits for the result cannot tell. Only passes that ended the service by themselves are not executed again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from skyrl.config import TrainingServiceConfig
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.reply import Json
from skyrl.errors import PassError, RequestError, RunError
from skyrl.processes.service_app import json_object
from skyrl.training_service.backend import AdamSettings, AdapterSpec, Backend, PassRequest, ServedModel
from skyrl.training_service.model_queue import ModelQueue, QueuedModel
from skyrl.training_service.passes import PassLimits, pass_body, pass_request
from skyrl.training_service.publishing import PublishedSnapshots
from skyrl.training_service.records import PassSummary, ServiceRecords, summary_of
from skyrl.training_service.samples import seed_from
from skyrl.training_service.store import Outcome, Store, StoredRequest, Tick

WEIGHTS = "weights"
"""Subfolder with everything that the backend saved: stored states, checkpoints and snapshots."""

SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 366 * 24 * 3600
"""Bounds of a checkpoint's time to live, in seconds: an hour and ten years."""

UNLOAD = -1
"""Number of the request to unload a model, which waits for no other one."""

_JOURNAL_BYTES = 256 << 20
"""Size of the requests in the journal beyond which the state is stored."""

_NO_LIMITS = PassLimits(datums=2**62, context=2**62, vocabulary=2**62)
"""Limits of a pass that was accepted, whatever they are now."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Finished:
    """A request with its outcome, before it is recorded."""

    request: StoredRequest
    outcome: Outcome
    journaled: bool = False
    """Whether the tick's replay needs the request's body."""

    summary: PassSummary | None = None
    """Record of a pass that changed the model's gradients."""


class Executor:
    """The models of the service and everything that changes them. One turn runs at a time."""

    def __init__(
        self,
        backend: Backend,
        store: Store,
        folder: Path,
        settings: TrainingServiceConfig,
        model: ServedModel,
        records: ServiceRecords | None = None,
    ) -> None:
        self.queue = ModelQueue(settings.max_pass_tokens)
        self.computing = asyncio.Lock()
        self.weights = folder / WEIGHTS
        most = 1 if model.full else settings.max_snapshots  # all weights of a model take the place of the base's
        self.published = PublishedSnapshots(backend, self.weights, self.computing, most)
        self._backend, self._store, self._settings, self._model = backend, store, settings, model
        self._records = records
        self._limits = PassLimits(datums=settings.max_datums, context=model.context, vocabulary=model.vocabulary)
        self._changed: set[str] = set()
        self._steps_since, self._bytes_since, self._stored_at = 0, 0, time.monotonic()
        self.running: frozenset[str] = frozenset()
        """Ids of the requests that are being executed."""

    async def restore(self) -> None:
        """Load the stored state and replay the journal. Raises what the backend raises, and `UserError` for the folder
        of another base model.
        """
        self._store.bind_base_model(self._model.names[0])
        self.weights.mkdir(parents=True, exist_ok=True)
        self._remove_unneeded()
        for row in self._store.all("SELECT model, folder, spec FROM states JOIN models ON models.id = states.model"):
            await self._backend.create(row["model"], _spec(row["spec"]))
            await self._backend.load(row["model"], self.weights / row["folder"], optimizer=True)
        for tick in self._store.journal():
            await self._replay(tick)
        for row in self._store.all("SELECT * FROM models WHERE alive"):
            self.queue.add(
                QueuedModel(
                    id=row["id"],
                    client=row["client"],
                    session=row["session"],
                    spec=_spec(row["spec"]),
                    next_seq=row["next_seq"],
                    steps=row["steps"],
                )
            )

    async def turn(self) -> list[str] | None:
        """Execute what can run now; returns the ids of the finished requests, or None if nothing can."""
        if (ending := self.queue.ending()) is not None:
            return await self._unload(ending)
        turn = self.queue.next_turn()
        if not turn:
            return None
        self.running = frozenset(request.id for _, request in turn)
        try:
            async with self.computing:
                if turn[0][1].kind == "pass":
                    await self._passes(turn)
                else:
                    await self._single(*turn[0])
        finally:
            self.running = frozenset()
        ended = [request.id for _, request in turn]
        for model, request in turn:
            model.waiting.pop(request.seq, None)
            model.next_seq = request.seq + 1
            if self.queue.get(model.id) is None:
                ended += [item.id for item in model.waiting.values()]
        return ended

    @property
    def state_due(self) -> bool:
        """Whether the state has to be stored now."""
        age = time.monotonic() - self._stored_at
        return bool(self._changed) and (
            self._steps_since >= self._settings.state_steps
            or self._bytes_since >= _JOURNAL_BYTES
            or age >= self._settings.state_seconds
        )

    async def store_state(self) -> None:
        """Store the state of the models that changed, after which the journal is empty."""
        async with self.computing:
            journal = self._store.journal()
            tick = journal[-1].number if journal else self._store.state_tick
            alive = {model.id for model in self.queue}
            folders = {}
            for model_id in sorted(self._changed & alive):
                folders[model_id] = await self._saved(model_id, f"state-{tick}", optimizer=True)
            self._store.set_state(tick, folders, self._changed - alive)
            self._changed.clear()
            self._steps_since, self._bytes_since, self._stored_at = 0, 0, time.monotonic()
        await self.collect()

    async def collect(self) -> None:
        """Unpublish snapshots and remove folders that nothing needs any more. Not during a turn."""
        await self.published.keep_only(self._store.folders())
        self._remove_unneeded()

    def fail_waiting(self, model: QueuedModel, reason: str) -> list[str]:
        """Finish all requests that a model will not execute any more; returns their ids."""
        outcome = failure(RequestError(reason))
        with self._store.transaction():
            for request in model.waiting.values():
                self._store.finish(request.id, outcome)
        return [request.id for request in model.waiting.values()]

    async def _unload(self, model: QueuedModel) -> list[str]:
        async with self.computing:
            await self._backend.unload(model.id)
            with self._store.transaction():
                self._store.add_tick("unload", {"model": model.id})
                self._store.run("UPDATE models SET alive = 0 WHERE id = ?", model.id)
                request = self._store.fetch_one("SELECT id FROM requests WHERE owner = ? AND seq = ?", model.id, UNLOAD)
                if request is not None:
                    answer = {"model_id": model.id, "type": "unload_model"}
                    self._store.finish(request["id"], Outcome(body=json.dumps(answer).encode()))
        self._changed.add(model.id)
        self.queue.remove(model.id)
        if self._records is not None:
            self._records.close_model(model.id)
        ended = self.fail_waiting(model, f"the model {model.id} was unloaded")
        return ended if request is None else [*ended, request["id"]]

    async def _passes(self, turn: Sequence[tuple[QueuedModel, StoredRequest]]) -> None:
        finished: list[Finished] = []
        computed: list[tuple[StoredRequest, PassRequest]] = []
        for _, request in turn:
            body = self._store.request(request.id).body
            try:
                computed.append((request, pass_request(body, self._limits)))
                self._bytes_since += len(body)
            except RequestError as error:
                finished.append(Finished(request=request, outcome=failure(error)))
        try:
            results = await self._backend.passes([item for _, item in computed]) if computed else []
        except PassError as error:
            outcome = failure(RuntimeError(str(error)))
            finished += [Finished(request=request, outcome=outcome) for request, _ in computed]
            self._record(finished, None, {})
            raise
        except Exception as error:  # noqa: BLE001 - it becomes the requests' outcome
            results = [error] * len(computed)
        for (request, parsed), result in zip(computed, results, strict=True):
            if isinstance(result, Exception):
                # A refusal is part of the composition that is replayed; after a failure, nothing is known of the pass.
                refused = isinstance(result, RequestError)
                finished.append(Finished(request=request, outcome=failure(result), journaled=refused))
            else:
                outcome = Outcome(body=pass_body(result), media="application/x-protobuf")
                summary = summary_of(parsed, result) if parsed.backward else None
                finished.append(Finished(request=request, outcome=outcome, journaled=True, summary=summary))
        changed = {item.request.owner for item in finished if item.summary is not None}
        self._changed |= changed
        content = {"requests": [item.request.id for item in finished if item.journaled]}
        self._record(finished, "passes" if changed else None, content)

    async def _single(self, model: QueuedModel, request: StoredRequest) -> None:
        run = {
            "create": self._create,
            "create_from": self._create_from,
            "step": self._step,
            "load": self._load,
            "save": self._save,
            "save_for_sampler": self._save_for_sampler,
            "save_external": self._save_external,
        }
        body = self._store.request(request.id).body
        try:
            if request.kind == "refused":
                raise RequestError(body.decode())
            await run[request.kind](model, request, Fields(json_object(body)))
        except Exception as error:  # noqa: BLE001 - it becomes the request's outcome
            self._record([Finished(request=request, outcome=failure(error))], None, {})
            if request.seq == 0:
                del model.waiting[0]
                self.queue.remove(model.id)
                self.fail_waiting(model, f"the model {model.id} could not be created")

    async def _create(self, model: QueuedModel, request: StoredRequest, fields: Fields) -> None:
        model.spec = adapter_spec(fields, self._settings, self._model, model.id)
        await self._backend.create(model.id, model.spec)
        answer = {"model_id": model.id, "type": "create_model"}
        with self._store.transaction():
            self._add_model(model, fields)
            self._finish(request, answer, "create", model=model.id, spec=_plain(model.spec))

    async def _create_from(self, model: QueuedModel, request: StoredRequest, fields: Fields) -> None:
        row, optimizer = self._checkpoint(fields, model.client)
        model.spec = _spec(row["spec"])
        await self._backend.create(model.id, model.spec)
        try:
            await self._backend.load(model.id, self.weights / row["folder"], optimizer=optimizer)
        except BaseException:
            await self._backend.unload(model.id)
            raise
        answer = {"path": row["path"], "model_id": model.id, "type": "load_weights"}
        content = {"model": model.id, "spec": _plain(model.spec), "folder": row["folder"], "optimizer": optimizer}
        with self._store.transaction():
            self._add_model(model, fields)
            self._finish(request, answer, "create_from", **content)

    async def _load(self, model: QueuedModel, request: StoredRequest, fields: Fields) -> None:
        row, optimizer = self._checkpoint(fields, model.client)
        await self._backend.load(model.id, self.weights / row["folder"], optimizer=optimizer)
        answer = {"path": row["path"], "model_id": model.id, "type": "load_weights"}
        with self._store.transaction():
            self._finish(request, answer, "load", model=model.id, folder=row["folder"], optimizer=optimizer)

    async def _step(self, model: QueuedModel, request: StoredRequest, fields: Fields) -> None:
        settings = adam_settings(fields)
        metrics = dict(await self._backend.optimizer_step(model.id, settings))
        with self._store.transaction():
            answer = {"metrics": metrics, "type": "optim_step"}
            self._finish(request, answer, "step", model=model.id, settings=asdict(settings))
            self._store.run("UPDATE models SET steps = steps + 1 WHERE id = ?", model.id)
        model.steps += 1
        self._steps_since += 1
        if self._records is not None:
            self._records.stepped(model, settings, metrics)

    async def _save(self, model: QueuedModel, request: StoredRequest, fields: Fields) -> None:
        await self._new_checkpoint(model, request, fields, "weights")

    async def _save_for_sampler(self, model: QueuedModel, request: StoredRequest, fields: Fields) -> None:
        if model.spec is not None and model.spec.value_head:
            raise RequestError("a critic computes values, and has no tokens to sample: store it with save_state")
        if "path" in fields:
            await self._new_checkpoint(model, request, fields, "sampler_weights")
            return
        number = fields.required_integer("sampling_session_seq_id", least=0, most=2**62)
        kind = fields.text("kind", "snapshot")
        if kind not in ("snapshot", "inflight"):
            raise RequestError(f"kind has to be snapshot or inflight, not {str(kind)[:40]!r}", param="kind")
        folder = await self._saved(model.id, f"sampler-{request.seq}", optimizer=False)
        await self.published.publish(model.id, folder)
        sampler = f"{model.session}:sample:{number}"
        inflight = model.id if kind == "inflight" else None
        with self._store.transaction():
            if inflight:
                self._store.run(
                    "UPDATE samplers SET folder = ?, step = ? WHERE inflight = ?", folder, model.steps, inflight
                )
            row = {"id": sampler, "client": model.client, "session": model.session, "model": model.id, "folder": folder}
            self._store.insert("samplers", {**row, "step": model.steps, "inflight": inflight}, instead="REPLACE")
            self._store.forget_samplers(model.id, self._settings.max_snapshots)
            self._finish(request, {"sampling_session_id": sampler, "type": "save_weights_for_sampler"})

    async def _save_external(self, model: QueuedModel, request: StoredRequest, fields: Fields) -> None:
        raise RequestError(
            "external weights are not supported: the service has no addresses for downloads; save_weights_for_sampler "
            f"writes a folder in {self.weights}, whose format other programs read"
        )

    async def _new_checkpoint(self, model: QueuedModel, request: StoredRequest, fields: Fields, kind: str) -> None:
        """Save a model under the name in the request: `weights` to go on learning, or `sampler_weights`."""
        name = fields.required_text("path")
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"path = {name[:80]!r} is no name for a checkpoint: use letters, digits, '.', '_' and '-'", param="path"
            )
        path, training = f"tinker://{model.id}/{kind}/{name}", kind == "weights"
        overwrite = training and fields.boolean("overwrite")
        if not overwrite and self._store.fetch_one("SELECT 1 FROM checkpoints WHERE path = ?", path):
            raise RequestError(f"there is a checkpoint {path} already: choose another name, or overwrite it")
        ttl = fields.integer("ttl_seconds", None, least=SHORTEST_TTL, most=LONGEST_TTL)
        metadata = fields.mapping("user_metadata")
        folder = await self._saved(model.id, f"{kind}-{request.seq}", optimizer=training)
        size = sum(file.stat().st_size for file in (self.weights / folder).rglob("*") if file.is_file())
        others = "SELECT COALESCE(SUM(size), 0) FROM checkpoints WHERE client = ? AND path != ?"
        used: int = self._store.one(others, model.client, path)[0] + size
        if used > self._settings.client_bytes:
            shutil.rmtree(self.weights / folder)
            raise RequestError(
                f"your checkpoints would take {used} bytes, and at most {self._settings.client_bytes} are allowed: "
                "delete some"
            )
        now = time.time()
        row = {
            "path": path,
            "model": model.id,
            "client": model.client,
            "kind": kind,
            "folder": folder,
            "size": size,
            "spec": json.dumps(_plain(model.spec)),
            "metadata": json.dumps(metadata),
            "optimizer": training,
            "step": model.steps,
            "created": now,
            "expires": None if ttl is None else now + ttl,
        }
        with self._store.transaction():
            self._store.insert("checkpoints", row, instead="REPLACE")
            self._finish(request, {"path": path, "type": "save_weights" if training else "save_weights_for_sampler"})

    async def _saved(self, model_id: str, name: str, *, optimizer: bool) -> str:
        """Save a model in a new folder; returns the folder's name. A restart removes one that was not recorded."""
        folder = f"{model_id.replace(':', '-')}-{name}"
        shutil.rmtree(self.weights / folder, ignore_errors=True)
        await self._backend.save(model_id, self.weights / folder, optimizer=optimizer)
        return folder

    def _checkpoint(self, fields: Fields, client: str) -> tuple[Json, bool]:
        path = fields.required_text("path")
        optimizer = fields.boolean("optimizer")
        check_optimizer(fields)
        row = self._store.fetch_one("SELECT * FROM checkpoints WHERE path = ? AND client = ?", path, client)
        if row is None:
            raise RequestError(f"there is no checkpoint {path[:200]}", param="path")
        if optimizer and not row["optimizer"]:
            raise RequestError(f"{path} has no optimizer state: load it without, or save it with save_state")
        base = fields.text("base_model")
        if base is not None and base not in self._model.names:
            raise RequestError(f"base_model = {base[:80]!r} is not {self._model.names[0]}, which the checkpoint adapts")
        return dict(row), optimizer

    def _add_model(self, model: QueuedModel, fields: Fields) -> None:
        row = {
            "id": model.id,
            "client": model.client,
            "session": model.session,
            "spec": json.dumps(_plain(model.spec)),
            "metadata": json.dumps(fields.mapping("user_metadata")),
            "next_seq": 0,
            "alive": 1,
            "last_request": time.time(),
        }
        self._store.insert("models", row)

    def _finish(self, request: StoredRequest, answer: Json, tick: str | None = None, **content: Any) -> None:
        """Record one request and its tick, of a model, in the open transaction."""
        if tick is not None:
            self._store.add_tick(tick, content)
            self._changed.add(content["model"])
        self._store.finish(request.id, Outcome(body=json.dumps(answer).encode()))
        self._advance(request)

    def _record(self, finished: Sequence[Finished], tick: str | None, content: Json) -> None:
        """Record several requests and their tick in a transaction of their own."""
        with self._store.transaction():
            number = None if tick is None else self._store.add_tick(tick, content)
            for entry in finished:
                self._store.finish(entry.request.id, entry.outcome, number if entry.journaled else None)
                self._advance(entry.request)
        for item in finished:
            model = self.queue.get(item.request.owner)
            if model is None or item.summary is None:
                continue
            model.loss = item.summary.loss_per_token
            if self._records is not None:
                self._records.passed(model, item.summary)

    def _advance(self, request: StoredRequest) -> None:
        update = "UPDATE models SET next_seq = ?, last_request = ? WHERE id = ?"
        self._store.run(update, request.seq + 1, time.time(), request.owner)

    async def _replay(self, tick: Tick) -> None:
        """Do again what a tick did. Results are stored already."""
        content, backend = tick.content, self._backend
        model = content.get("model", "")
        match tick.kind:
            case "passes":
                requests = [self._store.request(item) for item in content["requests"]]
                await backend.passes([pass_request(element.body, _NO_LIMITS) for element in requests])
                self._changed.update(request.owner for request in requests)
                self._bytes_since += sum(len(entry.body) for entry in requests)
            case "step":
                await backend.optimizer_step(model, AdamSettings(**content["settings"]))
                self._steps_since += 1
            case "create" | "create_from":
                await backend.create(model, _given_spec(content["spec"]))
            case "unload":
                await backend.unload(model)
        if tick.kind in ("load", "create_from"):
            await backend.load(model, self.weights / content["folder"], optimizer=content["optimizer"])
        if model:
            self._changed.add(model)

    def _remove_unneeded(self) -> None:
        """Remove folders that nothing needs any more, and what a killed service left half written."""
        needed = self._store.folders()
        for path in self.weights.iterdir():
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)


def failure(error: Exception) -> Outcome:
    """The outcome of a request that failed. An error of the run ends the service and is raised again."""
    if isinstance(error, RunError):
        raise error
    if not isinstance(error, RequestError):
        _log.error("a request of the training service failed", exc_info=error)
    user = isinstance(error, RequestError)
    text = str(error) if user else f"the service failed: {type(error).__name__}; see its log"
    body = json.dumps({"error": text, "category": "user" if user else "server"}).encode()
    return Outcome(body=body, failed=True)


def adapter_spec(
    fields: Fields, settings: TrainingServiceConfig, model: ServedModel, model_id: str
) -> AdapterSpec | None:
    """The adapter that a `create_model` asks for; None where all weights are trained. Raises `RequestError`."""
    base = fields.required_text("base_model")
    if base not in model.names:
        raise RequestError(
            f"base_model = {base[:80]!r} is not served here: {', '.join(model.names)}", param="base_model"
        )
    check_optimizer(fields)
    # SkyRL's clients add the field of the role; the public client has no place for it but the metadata.
    metadata = Fields(fields.mapping("user_metadata"))
    role = fields.text("model_role") or metadata.text("model_role") or "policy"
    if role not in ("policy", "critic"):
        raise RequestError(f"model_role = {role[:40]!r} is unknown: policy or critic", param="model_role")
    value_head = role == "critic"
    lora = Fields(fields.mapping("lora_config"))
    fields.ignore("session_id", "model_seq_id", "type")
    fields.finish()
    rank = lora.integer("rank", 32, least=1, most=settings.max_rank)
    seed = lora.integer("seed", None, least=-(2**63), most=2**64 - 1)
    parts = {name: lora.boolean(name, True) for name in ("train_attn", "train_mlp", "train_unembed")}
    lora.finish()
    if model.full and not value_head:
        return None
    if model.full:
        raise RequestError("this service trains all weights of one model, and no critic", param="model_role")
    if not any(parts.values()):
        raise RequestError(
            "lora_config trains nothing: set train_attn, train_mlp or train_unembed", param="lora_config"
        )
    seed = seed_from(model_id) if seed is None else seed % 2**63
    return AdapterSpec(rank=rank, seed=seed, value_head=value_head, **parts)


def check_optimizer(fields: Fields) -> None:
    """Raises `RequestError` for an optimizer other than AdamW."""
    kind = fields.mapping("optimizer_config").get("type", "adamw")
    if kind != "adamw":
        raise RequestError(
            f"optimizer_config.type = {str(kind)[:40]!r} is not supported: adamw is", param="optimizer_config"
        )


def adam_settings(fields: Fields) -> AdamSettings:
    """The settings of an `optim_step`. Raises `RequestError`, which names the field."""
    fields.refuse("optimizer_params", "the optimizer is AdamW, with adam_params")
    adam = Fields(fields.mapping("adam_params"))
    adam.refuse_null("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    default = AdamSettings()

    number = partial(adam.number, least=0.0)
    settings = AdamSettings(
        lr=number("learning_rate", default.lr, most=1e9),
        beta1=number("beta1", default.beta1, most=1.0),
        beta2=number("beta2", default.beta2, most=1.0),
        eps=number("eps", default.eps, most=1e9),
        weight_decay=number("weight_decay", default.weight_decay, most=1e9),
        max_grad_norm=number("grad_clip_norm", default.max_grad_norm, most=1e9),
    )
    adam.finish()
    return settings


def _plain(spec: AdapterSpec | None) -> dict[str, Any] | None:
    return None if spec is None else asdict(spec)


def _given_spec(values: Json | None) -> AdapterSpec | None:
    return None if values is None else AdapterSpec(**values)


def _spec(text: str | None) -> AdapterSpec | None:
    return _given_spec(json.loads(text or "null"))
