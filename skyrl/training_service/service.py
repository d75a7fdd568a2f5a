"""The training service without its HTTP routes: sessions, models, samplers, checkpoints, and futures of requests.

    submit -> stored, acknowledged -> ModelQueue -> Executor -> Backend
    sample -> stored, acknowledged -> a task of its own -> Backend.sample
    wait, completions -> results

Whatever an id names belongs to one client; for all others it does not exist.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from sqlite3 import Row
from typing import Any

from attrs import evolve, frozen

from skyrl.config import TrainingServiceConfig
from skyrl.endpoint.fields import Fields
from skyrl.errors import RequestError, RunError
from skyrl.processes.service_app import json_object
from skyrl.training_service.backend import Backend, SampleRequest, ServedModel
from skyrl.training_service.executor import LONGEST_TTL, SHORTEST_TTL, UNLOAD, Executor, failure
from skyrl.training_service.model_queue import Kind, QueuedModel
from skyrl.training_service.records import ServiceRecords
from skyrl.training_service.samples import sample_body, sample_request
from skyrl.training_service.store import Outcome, Store, StoredRequest

READ_SECONDS, UNREAD_SECONDS = 300.0, 600.0
"""Seconds for which a result is kept after it was read, and in any case after it was finished."""

RESULT_BYTES = 1 << 30
"""Maximum size of all kept results; the oldest ones go first."""

MOST_SEQ = 2**62
"""Largest number of a request."""

CLONE = 1_000_000_000
"""Copies of a sampling client number their requests from multiples of this."""

MOST_AHEAD = 10_000
"""Largest distance of a request's number from the one that its model executes next."""

MOST_SESSIONS = 1000
"""Maximum number of sessions of a client at once."""

_HOUSEKEEPING_SECONDS = 1.0


@frozen(kw_only=True)
class ModelStatus:
    """A model as `watch` shows it."""

    id: str
    client: str
    rank: int | None
    next_seq: int
    waiting: int
    steps: int
    loss: float | None


@frozen(kw_only=True)
class ClientStatus:
    """A client with an open session, and what it has of its quotas."""

    name: str
    models: int
    tokens: int
    """Number of tokens in its unfinished requests."""

    checkpoint_bytes: int


@frozen(kw_only=True)
class ServiceStatus:
    """Present work of a service, and counts since its start."""

    base: str
    """The base model."""

    models: tuple[ModelStatus, ...]
    clients: tuple[ClientStatus, ...]
    sessions: int
    samplers: int
    samples_running: int
    samples_waiting: int
    requests_waiting: int
    finished: Mapping[str, int]
    """Number of finished requests by kind."""

    tokens: int
    """Number of tokens in finished requests."""


class TrainingService:
    """A running service. All calls come from one event loop."""

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        settings: TrainingServiceConfig,
        model: ServedModel,
        records: ServiceRecords | None = None,
    ) -> None:
        """Raises `UserError` if another service uses the folder."""
        self.settings, self.model = settings, model
        self.store = Store(folder)
        self._backend, self._records = backend, records
        self.executor = Executor(backend, self.store, folder, settings, model, records)
        self._work = asyncio.Event()
        self._events: dict[str, asyncio.Event] = {}
        self._requests: dict[str, StoredRequest] = {}
        self._completed: dict[str, asyncio.Event] = {}
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(settings.max_samples)
        self._running_samples: set[str] = set()
        self._heartbeats: dict[str, float] = {}
        self._finished: dict[str, int] = {}
        self._tokens = 0
        self._stopping, self._garbage = False, False
        self._error: RunError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Restore what the folder holds and begin to execute requests."""
        await self.executor.restore()
        now = time.monotonic()
        self._heartbeats = {row["id"]: now for row in self.store.all("SELECT id FROM sessions WHERE finished IS NULL")}
        for request in self.store.unfinished():
            self._resume(request)
        self._tasks = [asyncio.create_task(self._execute()), asyncio.create_task(self._keep_house())]

    async def run(self) -> None:
        """Wait until the service fails. Raises the error of the backend or the disk that ended it."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """End the turn in progress, store the state, and close the file. A service that failed or did not start stores
        nothing: the next one continues from the journal.
        """
        self._stopping = True
        self._work.set()
        for task in (*self._samples.values(), *self._tasks[1:]):
            task.cancel()
        failed = await asyncio.gather(*self._tasks, *self._samples.values(), return_exceptions=True)
        try:
            if self._tasks and not any(isinstance(item, Exception) for item in failed):
                await self.executor.store_state()
        finally:
            self.store.close()

    # Sessions

    def new_session(self, client: str, fields: Fields) -> str:
        """Id of a new session."""
        many = self.store.one("SELECT COUNT(*) FROM sessions WHERE client = ? AND finished IS NULL", client)[0]
        if many >= MOST_SESSIONS:
            raise RequestError(f"you have {MOST_SESSIONS} open sessions: close some", status=429)
        session = f"s-{secrets.token_hex(8)}"
        row = {
            "id": session,
            "client": client,
            "project": fields.text("project_id"),
            "display_name": fields.text("display_name"),
            "tags": json.dumps(fields.value("tags", [])),
            "metadata": json.dumps(fields.mapping("user_metadata")),
            "created": time.time(),
        }
        self.store.insert("sessions", row)
        self._heartbeats[session] = time.monotonic()
        return session

    def heartbeat(self, client: str, session: str) -> None:
        """Note that a session's client lives."""
        self.open_session(client, session)
        self._heartbeats[session] = time.monotonic()

    def session(self, client: str, session: str) -> Row:
        """A session, which may have ended. Raises `RequestError` with 404 for one of another client."""
        row = self.store.fetch_one("SELECT * FROM sessions WHERE id = ? AND client = ?", session, client)
        if row is None:
            raise RequestError(f"there is no session {session[:100]}", status=404)
        return row

    def open_session(self, client: str, session: str) -> Row:
        """A session that has not ended. Raises `RequestError` with 404 or 410."""
        row = self.session(client, session)
        if row["finished"] is not None:
            raise RequestError(f"the session {session} has ended: create a new ServiceClient", status=410)
        return row

    def finish_session(self, session: str, reason: str, detail: str | None) -> None:
        """End a session: its models are unloaded, its sampling sessions end."""
        self._heartbeats.pop(session, None)
        samplers = [row["id"] for row in self.store.all("SELECT id FROM samplers WHERE session = ?", session)]
        with self.store.transaction():
            ended = "UPDATE sessions SET finished = ?, detail = ? WHERE id = ? AND finished IS NULL"
            self.store.run(ended, reason, detail, session)
            self.store.run("DELETE FROM samplers WHERE session = ?", session)
        for sampler in samplers:
            for request_id in [sample for sample in self._samples if sample.rpartition(":")[0] == sampler]:
                self.cancel(request_id)
        for model in self.executor.queue:
            model.ending |= model.session == session
        self._garbage = True
        self._work.set()

    # Requests of models

    def create(self, client: str, kind: Kind, fields: Fields, body: bytes) -> StoredRequest:
        """Submit the request that makes a model. Raises `RequestError` if there are too many."""
        session = fields.required_text("session_id")
        self.open_session(client, session)
        number = fields.required_integer("model_seq_id", least=0, most=MOST_SEQ)
        model_id = f"{session}:train:{number}"
        known = self._find_request(f"{model_id}:0", client, kind)
        if known is not None:
            return known
        if self.store.fetch_one("SELECT 1 FROM models WHERE id = ?", model_id):
            raise RequestError(f"there was a model {model_id} already: use another model_seq_id")
        models = list(self.executor.queue)
        most = 1 if self.model.full else self.settings.max_models
        if len(models) >= most:
            raise RequestError(
                f"the service holds {most} models, which is its limit: close a ServiceClient that has one"
            )
        if sum(model.client == client for model in models) >= self.settings.client_models:
            raise RequestError(f"you have {self.settings.client_models} models, which is the limit of a client")
        request = StoredRequest(id=f"{model_id}:0", kind=kind, owner=model_id, seq=0, client=client, body=body)
        self.store.add_request(request)
        return self._enqueue(request)

    def submit(self, client: str, kind: Kind, model_id: str, seq: int, tokens: int, body: bytes) -> StoredRequest:
        """Store a request of a model and queue it. A request of the same number is the same request."""
        model = self.model_of(client, model_id)
        known = self._find_request(f"{model_id}:{seq}", client, kind)
        if known is not None:
            return known
        request = StoredRequest(
            id=f"{model_id}:{seq}", kind=kind, owner=model_id, seq=seq, client=client, tokens=tokens, body=body
        )
        if seq < model.next_seq:
            return request  # executed, and its result forgotten
        if seq > model.next_seq + MOST_AHEAD:
            raise RequestError(f"seq_id = {seq}, and {model_id} waits for {model.next_seq}", param="seq_id")
        self._check_room(client, tokens, next_one=seq == model.next_seq)
        self.store.add_request(request)
        return self._enqueue(request)

    def unload(self, client: str, model_id: str) -> str:
        """Unload a model once its turn in progress has ended; returns the id of this request."""
        request_id = f"{model_id}:unload"
        if self._find_request(request_id, client, "unload") is None:
            model = self.model_of(client, model_id)
            request = StoredRequest(id=request_id, kind="unload", owner=model_id, seq=UNLOAD, client=client)
            self.store.add_request(request)
            self._await_end(request)
            model.ending = True
            self._work.set()
        return request_id

    def model_of(self, client: str, model_id: str) -> QueuedModel:
        """A loaded model of a client. Raises `RequestError` with 404."""
        model = self.executor.queue.get(model_id)
        if model is None or model.client != client:
            raise RequestError(f"there is no model {model_id[:200]}", status=404)
        return model

    # Sampling

    def new_sampler(self, client: str, fields: Fields) -> str:
        """Id of a sampling session on a checkpoint or the base model."""
        session = fields.required_text("session_id")
        self.open_session(client, session)
        number = fields.required_integer("sampling_session_seq_id", least=0, most=MOST_SEQ)
        path, base = fields.text("model_path"), fields.text("base_model")
        if base is not None and base not in self.model.names:
            raise RequestError(f"base_model = {base[:80]!r} is not served here: {', '.join(self.model.names)}")
        if path is None and base is None:
            raise RequestError("model_path or base_model is missing")
        row = {"id": f"{session}:sample:{number}", "client": client, "session": session}
        if path is not None:
            stored = self.checkpoint(client, path)
            if (json.loads(stored["spec"] or "null") or {}).get("value_head"):
                raise RequestError(f"{path} is a critic, which computes values, and has no tokens to sample")
            row |= {"path": path, **{name: stored[name] for name in ("folder", "model", "step")}}
        self.store.insert("samplers", row, instead="IGNORE")
        return row["id"]

    def sampler(self, client: str, sampler: str) -> Row:
        """A sampling session. Raises `RequestError` with 404."""
        row = self.store.fetch_one("SELECT * FROM samplers WHERE id = ? AND client = ?", sampler, client)
        if row is None:
            raise RequestError(
                f"there is no sampling session {sampler[:200]}: it has ended, or was that of a snapshot without a "
                f"name, of which a model keeps its last {self.settings.max_snapshots}",
                status=404,
            )
        return row

    def join_sampler(self, client: str, sampler: str) -> int:
        """A number for one more copy of a sampling client."""
        clones = int(self.sampler(client, sampler)["clones"]) + 1
        self.store.run("UPDATE samplers SET clones = ? WHERE id = ?", clones, sampler)
        return clones

    def sample(self, client: str, body: bytes) -> tuple[str, int]:
        """Store a sampling request and start it; returns its id and the number of samples. Raises `RequestError`, with
        429 if the client has to wait.
        """
        fields = Fields(json_object(body))
        sampler = fields.required_text("sampling_session_id")
        seq = fields.required_integer("seq_id", least=0, most=MOST_SEQ)
        folder = self.sampler(client, sampler)["folder"]
        request_id = f"{sampler}:{seq}"
        sampling_request = self._sample_request(fields, folder, request_id)
        if self._find_request(request_id, client, "sample") is not None:
            return request_id, sampling_request.n
        tokens = sampling_request.n * (len(sampling_request.prompt) + (sampling_request.max_tokens or 0))
        self._check_room(client, tokens, next_one=False)
        if len(self._samples) >= 4 * self.settings.max_samples:
            raise RequestError("too many samples wait: try again", status=429)
        request = StoredRequest(
            id=request_id, kind="sample", owner=sampler, seq=seq, client=client, tokens=tokens, body=body
        )
        self.store.add_request(request)
        self._start_sample(request)
        return request_id, sampling_request.n

    def cancel(self, request_id: str) -> None:
        """End a sampling request that nobody waits for any more."""
        task = self._samples.get(request_id)
        if task is not None:
            task.cancel()
            self._end(request_id, failure(RequestError("the request was cancelled")))

    # Futures

    def owned(self, client: str, request_id: str) -> None:
        """Raises `RequestError` with 404 for a request of another client, and with 410 for a result that is gone."""
        row = self.store.fetch_one("SELECT client, done, result FROM requests WHERE id = ?", request_id)
        if row is not None and row["client"] == client:
            if row["done"] is not None and row["result"] is None:
                raise RequestError(f"the result of {request_id} was kept for a while and is gone", status=410)
            return
        owner, _, number = request_id.rpartition(":")
        model = self.store.fetch_one("SELECT next_seq FROM models WHERE id = ? AND client = ?", owner, client)
        sampler = self.store.fetch_one("SELECT 1 FROM samplers WHERE id = ? AND client = ?", owner, client)
        if number.isdecimal() and row is None and (sampler or (model and int(number[:20]) < model["next_seq"])):
            raise RequestError(f"the result of {request_id[:200]} was kept for a while and is gone", status=410)
        raise RequestError(f"there is no request {request_id[:200]}", status=404)

    async def wait(self, request_id: str, seconds: float) -> Outcome | None:
        """The outcome of a request, if it is finished within a time."""
        event = self._events.get(request_id)
        if event is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
        row = self.store.fetch_one("SELECT result, media, failed FROM requests WHERE id = ?", request_id)
        if row is None or row["result"] is None:
            return None
        return Outcome(body=row["result"], media=row["media"], failed=bool(row["failed"]))

    def mark_read(self, request_id: str) -> None:
        """Note that a result was delivered, after which it is kept for a shorter time."""
        self.store.run(
            "UPDATE requests SET read_at = ? WHERE id = ? AND done IS NOT NULL AND read_at IS NULL",
            time.time(),
            request_id,
        )

    def queue_state(self, client: str, request_id: str) -> str:
        """Why a request is not finished, in the client's words."""
        request = self._requests.get(request_id)
        if request is None or request_id in self.executor.running or request_id in self._running_samples:
            return "active"
        if self._tokens_in_flight(client) >= self.settings.client_queue_length:
            return "paused_rate_limit"
        model = self.executor.queue.get(request_id.rpartition(":")[0])
        return "active" if model is not None and model.next_seq != request.seq else "paused_capacity"

    async def completions(
        self, sampler: str, clone: int, cursor: int, seconds: float
    ) -> tuple[Sequence[Mapping[str, Any]], int]:
        """Requests of a sampling session that finished after the cursor, and the next cursor."""
        deadline = time.monotonic() + seconds
        while True:
            rows = self.store.all(
                "SELECT id, done, failed, LENGTH(result) AS size FROM requests WHERE owner = ? AND done > ? "
                "AND seq >= ? AND seq < ? ORDER BY done LIMIT 1000",
                sampler,
                cursor,
                clone * CLONE,
                (clone + 1) * CLONE,
            )
            left = deadline - time.monotonic()
            if rows or left <= 0:
                return [_completion(row) for row in rows], max([cursor, *(row["done"] for row in rows)])
            event = self._completed.setdefault(sampler, asyncio.Event())
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), left)

    # Checkpoints

    def checkpoint(self, client: str, path: str) -> Row:
        """A checkpoint of a client. Raises `RequestError` with 404."""
        row = self.store.fetch_one("SELECT * FROM checkpoints WHERE path = ? AND client = ?", path, client)
        if row is None:
            raise RequestError(f"there is no checkpoint {path[:200]}", status=404)
        return row

    def delete_checkpoint(self, client: str, path: str) -> None:
        """Forget a checkpoint; its files go once nothing else needs them."""
        self.checkpoint(client, path)
        self.store.run("DELETE FROM checkpoints WHERE path = ?", path)
        self._garbage = True

    def copy_checkpoint(self, client: str, fields: Fields) -> str:
        """Path of a copy of a checkpoint in a new training run, which shares the files."""
        source = dict(self.checkpoint(client, fields.required_text("source_path")))
        ttl = fields.integer("ttl_seconds", None, least=SHORTEST_TTL, most=LONGEST_TTL)
        session = fields.text("session_id")
        if session is None:
            session = self.new_session(client, Fields({"project_id": fields.text("destination_project_id")}))
            number = 0
        else:
            self.open_session(client, session)
            number = fields.required_integer("model_seq_id", least=0, most=MOST_SEQ)
        model = f"{session}:train:{number}"
        if self.store.fetch_one("SELECT 1 FROM models WHERE id = ?", model) or self.executor.queue.get(model):
            raise RequestError(f"there is a training run {model} already", param="model_seq_id")
        now = time.time()
        path = f"tinker://{model}/{source['kind']}/{source['path'].rpartition('/')[2]}"
        with self.store.transaction():
            row = {"id": model, "client": client, "session": session, "spec": source["spec"], "last_request": now}
            self.store.insert("models", row | {"next_seq": 0, "alive": 0})
            copy = {"path": path, "model": model, "created": now, "expires": now + ttl if ttl else None}
            self.store.insert("checkpoints", source | copy)
        return path

    # Status

    def status(self) -> ServiceStatus:
        """Models, queues and counts."""
        models = tuple(
            ModelStatus(
                id=model.id,
                client=model.client,
                rank=None if model.spec is None else model.spec.rank,
                next_seq=model.next_seq,
                waiting=len(model.waiting),
                steps=model.steps,
                loss=model.loss,
            )
            for model in self.executor.queue
        )
        running = len(self._running_samples)
        rows = self.store.all(
            "SELECT client, (SELECT COALESCE(SUM(size), 0) FROM checkpoints WHERE client = sessions.client) AS bytes "
            "FROM sessions WHERE finished IS NULL GROUP BY client ORDER BY client"
        )
        clients = tuple(
            ClientStatus(
                name=row["client"],
                models=sum(model.client == row["client"] for model in models),
                tokens=self._tokens_in_flight(row["client"]),
                checkpoint_bytes=row["bytes"],
            )
            for row in rows
        )
        return ServiceStatus(
            base=self.model.names[0],
            models=models,
            clients=clients,
            sessions=len(self._heartbeats),
            samplers=len(self.executor.published),
            samples_running=running,
            samples_waiting=len(self._samples) - running,
            requests_waiting=sum(model.waiting for model in models),
            finished=dict(self._finished),
            tokens=self._tokens,
        )

    # Internals

    def _find_request(self, request_id: str, client: str, kind: str) -> StoredRequest | None:
        """The request of this id, if it came before. Raises `RequestError` if it asked for something else."""
        row = self.store.fetch_one("SELECT kind, client FROM requests WHERE id = ?", request_id)
        if row is None:
            return None
        if row["client"] != client:
            raise RequestError(f"there is no request {request_id}", status=404)
        if row["kind"] != kind:
            raise RequestError(f"seq_id: {request_id} was a request of another kind, {row['kind']}", param="seq_id")
        return self.store.request(request_id)

    def _check_room(self, client: str, tokens: int, *, next_one: bool) -> None:
        in_flight = self._tokens_in_flight(client)
        if in_flight and in_flight + tokens > self.settings.client_queue_length and not next_one:
            raise RequestError(f"you have {in_flight} tokens in flight: try again when some are done", status=429)

    def _tokens_in_flight(self, client: str) -> int:
        return sum(request.tokens for request in self._requests.values() if request.client == client)

    def _enqueue(self, request: StoredRequest) -> StoredRequest:
        waiting = self._await_end(request)
        model = self.executor.queue.get(request.owner)
        if model is None:
            model = QueuedModel(id=request.owner, client=request.client, session=request.owner.partition(":")[0])
            self.executor.queue.add(model)
        model.waiting[request.seq] = waiting
        self._work.set()
        return waiting

    def _resume(self, request: StoredRequest) -> None:
        """Queue a request of the time before a restart."""
        if request.kind == "sample":
            self._start_sample(request)
        elif request.seq == UNLOAD and (model := self.executor.queue.get(request.owner)) is not None:
            self._await_end(request)
            model.ending = True
        elif request.seq == 0 or self.executor.queue.get(request.owner) is not None:
            self._enqueue(request)
        else:
            with self.store.transaction():
                self.store.finish(request.id, failure(RequestError(f"the model {request.owner} was unloaded")))

    def _await_end(self, request: StoredRequest) -> StoredRequest:
        waiting = evolve(request, body=b"")
        self._requests[request.id] = waiting
        self._events[request.id] = asyncio.Event()
        return waiting

    def _start_sample(self, request: StoredRequest) -> None:
        self._await_end(request)
        self._samples[request.id] = asyncio.create_task(self._draw(request))

    async def _draw(self, request: StoredRequest) -> None:
        try:
            async with self._slots:
                sampler = self.store.fetch_one("SELECT * FROM samplers WHERE id = ?", request.owner)
                if sampler is None:
                    raise RequestError("the sampling session has ended")
                fields = Fields(json_object(request.body))
                sampling_request = self._sample_request(fields, sampler["folder"], request.id)
                async with self.executor.published.using(sampling_request.sampler):
                    self._running_samples.add(request.id)
                    result = await self._backend.sample(sampling_request)
            if self._records is not None:
                source, step = sampler["model"] or self.model.names[0], sampler["step"] or 0
                self._records.sampled(source, step, request.seq, sampling_request, result)
            last = fields.integer("prompt_logprobs_last_n", None, least=1, most=MOST_SEQ)
            outcome = Outcome(body=sample_body(result, last), media="application/x-protobuf")
        except RunError as error:
            self._error = error
            self._work.set()
            return
        except Exception as error:  # noqa: BLE001 - it becomes the request's outcome
            outcome = failure(error)
        self._end(request.id, outcome)

    def _sample_request(self, fields: Fields, folder: str | None, request_id: str) -> SampleRequest:
        sampling_request = sample_request(fields, folder, self.model, request_id)
        fields.ignore("sampling_session_id", "seq_id", "base_model", "model_path", "type")
        fields.finish()
        return sampling_request

    def _end(self, request_id: str, outcome: Outcome) -> None:
        with self.store.transaction():
            self.store.finish(request_id, outcome)
        self._samples.pop(request_id, None)
        self._running_samples.discard(request_id)
        self._announce(request_id)

    def _announce(self, request_id: str) -> None:
        """Wake up those who wait for a request."""
        request = self._requests.pop(request_id, None)
        event = self._events.pop(request_id, None)
        if event is not None:
            event.set()
        completed = self._completed.pop(request_id.rpartition(":")[0], None)
        if completed is not None:
            completed.set()
        if request is not None:
            self._finished[request.kind] = self._finished.get(request.kind, 0) + 1
            self._tokens += request.tokens

    def _give_up_waiting(self, model: QueuedModel) -> None:
        """Fail requests behind one that never arrived: their client may have lost it and would wait for ever."""
        reason = (
            f"seq_id {model.next_seq} of {model.id} has not arrived for {self.settings.session_seconds:g} s, and "
            "requests run in their order: its client lost it. Continue from a saved state with a new TrainingClient"
        )
        for request_id in self.executor.fail_waiting(model, reason):
            self._announce(request_id)
        model.waiting.clear()

    async def _execute(self) -> None:
        while not self._stopping:
            if self._error is not None:
                raise self._error
            self._work.clear()
            ended = await self.executor.turn()
            for request_id in ended or ():
                self._announce(request_id)
            if self.executor.state_due:
                await self.executor.store_state()
            if self._garbage:
                self._garbage = False
                await self.executor.collect()
            if ended is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._work.wait(), _HOUSEKEEPING_SECONDS)

    async def _keep_house(self) -> None:
        """End silent sessions and waits for lost requests, and forget old results and expired checkpoints."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            silent = time.monotonic() - self.settings.session_seconds
            for session in [item for item, beat in self._heartbeats.items() if beat < silent]:
                self.finish_session(session, "expired", "no heartbeat")
            for model in self.executor.queue:
                if model.seconds_of_gap(time.monotonic()) > self.settings.session_seconds:
                    self._give_up_waiting(model)
            now = time.time()
            if self.store.fetch_one("SELECT 1 FROM checkpoints WHERE expires < ?", now):
                self.store.run("DELETE FROM checkpoints WHERE expires < ?", now)
                self._garbage = True
            self.store.forget_results(
                read_before=now - READ_SECONDS, done_before=now - UNREAD_SECONDS, most_bytes=RESULT_BYTES
            )


def _completion(row: Row) -> Mapping[str, Any]:
    if row["failed"]:
        return {"state": "failed", "request_id": row["id"]}
    return {"state": "finished", "request_id": row["id"], "response_payload_uncompressed_size": row["size"]}
