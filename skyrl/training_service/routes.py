"""The routes of the Tinker API, client version 0.38, on a `TrainingService`.

A request that names its model and number is accepted, whatever its arguments: a mistake in them becomes its result, so
that the requests after it run. Everything else is refused at once, with an HTTP status and `{"error", "category"}`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from sqlite3 import Row
from typing import Any

import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from skyrl.endpoint.fields import Fields
from skyrl.endpoint.reply import Json
from skyrl.errors import RequestError
from skyrl.processes.addresses import is_loopback
from skyrl.processes.service_app import body_of, json_object, key_of, post_route, service_app
from skyrl.training_service.executor import LONGEST_TTL, SHORTEST_TTL
from skyrl.training_service.model_queue import Kind
from skyrl.training_service.passes import address_of, address_of_start
from skyrl.training_service.service import CLONE, MOST_SEQ, ServiceStatus, TrainingService
from skyrl.training_service.store import client_of

POLL_SECONDS = 30.0
"""Time for which an answer about an unfinished request is held back; the client waits for 45 s."""

INLINE_BYTES = 1 << 20
"""Size of a result beyond which the client is told the size first, if it allows that."""

LOCAL = "local"
"""Name of every client of a service without tokens."""

TOKEN_BYTES = 64
"""Size of a pass per token beyond which it counts as more tokens than it has."""

LONGEST_ORDER = 1 << 16
"""Maximum size of a request of a model that is no pass, which waits on the disk for its turn."""

_COMPRESSED = 1 << 12
"""Size from which an answer is compressed."""

_PROTOBUF = "application/x-protobuf"

Answer = Callable[[str, Fields, bytes], Json | Response]
"""Answers a request, given the client's name, the arguments and the body: with JSON, or a response."""

_REFUSED = {
    "publishing": (
        ("POST", "training_runs/{run}/checkpoints/{kind}/{name}/publish"),
        ("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}/publish"),
    ),
    "billing": (
        ("GET", "billing/usage/events"),
        ("GET", "billing/usage/checkpoints/current"),
        ("GET", "audit"),
    ),
    "addresses of external weights": (("GET", "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"),),
    "custom losses on the server": (("POST", "create_custom_loss"),),
    "exporting traces": (("GET", "sessions/{session}/trace_export"),),
    "tokens of JWT": (("POST", "auth/token"),),
}
"""Routes of what is not there, by its name."""


def training_app(service: TrainingService, *, with_tokens: bool) -> Starlette:
    """The ASGI app. `with_tokens`: every request needs the token of a client."""

    def admit(request: Request) -> None:
        client = client_of(service.store, key_of(request)) if with_tokens else LOCAL
        if client is None:
            raise RequestError("this service requires a client's token, as api_key or TINKER_API_KEY", status=401)
        request.state.client = client

    return service_app(_routes(service), token="of each client" if with_tokens else None, admit=admit, refusal=_refusal)


def _refusal(error: RequestError) -> Response:
    category = "user" if error.status < 500 else "server"
    return JSONResponse({"error": str(error), "category": category}, error.status)


def _routes(service: TrainingService) -> list[BaseRoute]:
    prefix = "/api/v1/"
    answers = _Answers(service)

    async def metrics(request: Request) -> Response:  # a coroutine: the service is used from its loop alone
        return Response(prometheus_text(service.status()), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes: list[BaseRoute] = [
        Route("/metrics", metrics),
        _post(service, prefix + "forward_backward", answers.forward_backward, cut=True),
        _post(service, prefix + "asample", answers.asample),
        _post(service, prefix + "retrieve_future", answers.retrieve),
        _post(service, prefix + "retrieve_futures", answers.retrieve_several),
    ]
    routes += [_post(service, prefix + path, _parse_fields(answer)) for path, answer in answers.of_bodies().items()]
    for (method, path), answer in answers.of_paths().items():
        routes.append(Route(prefix + path, _bodiless(answer), methods=[method]))
    for feature, endpoints in _REFUSED.items():
        routes += [Route(prefix + path, _refuser(feature), methods=[method]) for method, path in endpoints]
    return routes


Work = Callable[[Request, str, bytes], Awaitable[Response]]


def _post(service: TrainingService, path: str, work: Work, *, cut: bool = False) -> BaseRoute:
    """A POST route whose body may be compressed. `work` gets the client's name and the body; of a body that is too
    long, with `cut`, one byte more than is allowed.
    """
    longest = service.settings.max_body_bytes

    async def respond(request: Request, body: bytes) -> Response:
        content = decompressed(request, body, longest + 1)
        if len(content) > longest and not cut:
            raise RequestError(f"the body is longer than {longest} bytes", status=413)
        response = await work(request, request.state.client, content)
        if len(response.body) < _COMPRESSED or "zstd" not in request.headers.get("accept-encoding", ""):
            return response
        compressed = zstandard.ZstdCompressor(level=1).compress(bytes(response.body))
        return Response(compressed, response.status_code, {"content-encoding": "zstd"}, response.media_type)

    return post_route(path, respond, longest=longest, cut=cut)


def _parse_fields(answer: Answer) -> Work:
    async def work(request: Request, client: str, body: bytes) -> Response:
        return _reply(answer(client, Fields(json_object(body) | request.path_params), body))

    return work


def _bodiless(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """A route whose arguments are in its path, its query, or a small body in JSON."""

    async def respond(request: Request) -> Response:
        body = await body_of(request)
        payload = json_object(body) if body else {}
        fields = Fields({**request.query_params, **payload, **request.path_params})
        return _reply(answer(request.state.client, fields, body))

    return respond


def _reply(content: Json | Response) -> Response:
    return content if isinstance(content, Response) else JSONResponse(content)


def _refuser(feature: str) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        raise RequestError(f"{feature}: not supported by this service", code="unsupported_value")

    return respond


def decompressed(request: Request, body: bytes, most: int) -> bytes:
    """The content of a body, or its first `most` bytes. Raises `RequestError` for an unknown encoding."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise RequestError(f"content-encoding {encoding[:40]!r} is not supported: zstd is", status=415)
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            content: bytes = reader.read(most)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not zstd: {error}") from error
    return content


def prometheus_text(status: ServiceStatus) -> str:
    """All numbers of a status in Prometheus' text format. They name no client and no model, as every client may read
    them.
    """
    finished = {f'{{kind="{kind}"}}': count for kind, count in sorted(status.finished.items())}
    metrics = {
        "models": ("gauge", "Models that are loaded.", len(status.models)),
        "clients": ("gauge", "Clients with an open session.", len(status.clients)),
        "sessions": ("gauge", "Open sessions.", status.sessions),
        "published_snapshots": ("gauge", "Snapshots that the engines hold.", status.samplers),
        "samples_running": ("gauge", "Sampling requests that the engines work on.", status.samples_running),
        "samples_waiting": ("gauge", "Sampling requests that wait for an engine.", status.samples_waiting),
        "requests_waiting": ("gauge", "Requests of models that are not finished.", status.requests_waiting),
        "tokens_in_flight": ("gauge", "Tokens in unfinished requests.", sum(item.tokens for item in status.clients)),
        "checkpoint_bytes": ("gauge", "Bytes of checkpoints.", sum(item.checkpoint_bytes for item in status.clients)),
        "requests_total": ("counter", "Finished requests by kind, since the start of the service.", finished),
        "tokens_total": ("counter", "Tokens of finished requests, since the start of the service.", status.tokens),
    }
    lines: list[str] = []
    for name, (kind, meaning, value) in metrics.items():
        lines += [f"# HELP skyrl_training_{name} {meaning}", f"# TYPE skyrl_training_{name} {kind}"]
        values = value if isinstance(value, dict) else {"": value}
        lines += [f"skyrl_training_{name}{labels} {number}" for labels, number in values.items()]
    return "\n".join(lines) + "\n"


class _Answers:
    """Handlers of the routes."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    def of_bodies(self) -> Mapping[str, Answer]:
        """Handlers of POST routes with JSON bodies, by path."""
        return {
            "client/config": self._config,
            "client/dynamic_config": lambda client, fields, body: {"sample_cancel_enabled": True},
            "telemetry": lambda client, fields, body: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": partial(self._create, "create"),
            "get_info": self._info,
            "unload_model": self._unload,
            "optim_step": partial(self._submit, "step"),
            "save_weights": partial(self._submit, "save"),
            "save_weights_for_sampler": partial(self._submit, "save_for_sampler"),
            "save_weights_external": partial(self._submit, "save_external"),
            "load_weights": self._load,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
            "copy_weights": self._copy,
            "sessions/search": self._search,
        }

    def of_paths(self) -> Mapping[tuple[str, str], Answer]:
        """Handlers of routes without a body of their own, by method and path: lists, and changes to a checkpoint or
        session that the path names.
        """
        checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
        return {
            ("GET", "healthz"): lambda client, fields, body: {"status": "ok"},
            ("GET", "get_server_capabilities"): self._capabilities,
            ("GET", "samplers/{sampler}"): self._sampler,
            ("GET", "sessions"): self._sessions,
            ("GET", "sessions/{session}"): self._session,
            ("PUT", "sessions/{session}/project"): self._project,
            ("GET", "training_runs"): self._runs,
            ("GET", "training_runs/{run}"): self._run,
            ("GET", "training_runs/{run}/checkpoints"): self._run_checkpoints,
            ("GET", "checkpoints"): self._checkpoints,
            ("DELETE", checkpoint): self._delete,
            ("PUT", checkpoint + "/ttl"): self._ttl,
        }

    # Handlers that read the body themselves, or wait

    async def forward_backward(self, request: Request, client: str, body: bytes) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _PROTOBUF:
            raise RequestError(
                f"a forward_backward has to be protobuf, with the header Content-Type: {_PROTOBUF}", status=415
            )
        most = self._service.settings.max_body_bytes
        model_id, seq, tokens = address_of(body) if len(body) <= most else address_of_start(body)
        if seq < 1:
            raise RequestError(f"seq_id has to be at least 1, not {seq}", param="seq_id")
        if len(body) > most:
            reason = f"the body is longer than {most} bytes, training_service.max_body_bytes: send shorter sequences"
            return JSONResponse(self._refused(client, model_id, seq, reason))
        self._service.submit(client, "pass", model_id, seq, max(tokens, len(body) // TOKEN_BYTES), body)
        return JSONResponse(_future(f"{model_id}:{seq}", model_id))

    def _refused(self, client: str, model_id: str, seq: int, reason: str) -> Json:
        """A refusal in the place of a request, so that its model goes on with the next one."""
        self._service.submit(client, "refused", model_id, seq, 0, reason.encode())
        return _future(f"{model_id}:{seq}", model_id)

    async def asample(self, request: Request, client: str, body: bytes) -> Response:
        request_id, n = self._service.sample(client, body)
        return JSONResponse(
            {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(n)]}
        )

    async def retrieve(self, request: Request, client: str, body: bytes) -> Response:
        fields = Fields(json_object(body))
        request_id = fields.required_text("request_id")
        metadata_only = fields.boolean("allow_metadata_only")
        fields.finish()
        self._service.owned(client, request_id)
        outcome = await self._service.wait(request_id, POLL_SECONDS)
        if outcome is None:
            state = self._service.queue_state(client, request_id)
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": state})
        if metadata_only and not outcome.failed and len(outcome.body) > INLINE_BYTES:
            return JSONResponse({"status": "complete_metadata", "response_payload_size": len(outcome.body)})
        self._service.mark_read(request_id)
        return Response(outcome.body, media_type=outcome.media)

    async def retrieve_several(self, request: Request, client: str, body: bytes) -> Response:
        fields = Fields(json_object(body))
        target = Fields(fields.mapping("target"))
        sampler = target.text("sampling_session_id")
        if sampler is None:
            raise RequestError("target.sampling_session_id is missing", param="target.sampling_session_id")
        clone = target.integer("cloned_sampler_id", 0, least=0, most=CLONE)
        cursor = fields.integer("prev_cursor", 0, least=0, most=MOST_SEQ)
        seconds = fields.number("timeout", POLL_SECONDS, least=0.0, most=1e9)
        retrieved = fields.texts("retrieved_request_ids")
        self._service.sampler(client, sampler)
        for request_id in retrieved:
            if request_id.rpartition(":")[0] == sampler:
                self._service.mark_read(request_id)
        completions, cursor = await self._service.completions(sampler, clone, cursor, min(seconds, POLL_SECONDS))
        return JSONResponse({"completions": list(completions), "cursor": cursor})

    # Handlers of bodies

    def _config(self, client: str, fields: Fields, body: bytes) -> Json:
        limits = self._service.settings
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": not is_loopback(limits.host),
            "fwdbwd_max_chunk_len": min(1024, limits.max_datums),
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, limits.max_body_bytes // 2),
            # The client's poller may lose its cancellation, and `ServiceClient.close` would then wait for ever.
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": True,
            "sample_max_concurrent_requests": 2 * limits.max_samples,
            "custom_loss_server_side": False,
        }

    def _create_session(self, client: str, fields: Fields, body: bytes) -> Json:
        return {"session_id": self._service.new_session(client, fields), "type": "create_session"}

    def _heartbeat(self, client: str, fields: Fields, body: bytes) -> Json:
        self._service.heartbeat(client, fields.required_text("session_id"))
        return {"type": "session_heartbeat"}

    def _finish(self, client: str, fields: Fields, body: bytes) -> Json:
        session = fields.required_text("session_id")
        if self._service.session(client, session)["finished"] is None:
            reason = fields.mapping("reason").get("type")
            if reason not in ("success", "errored", "interrupted"):
                raise RequestError("reason.type has to be success, errored or interrupted", param="reason")
            self._service.finish_session(session, str(reason), fields.text("detail"))
        return {}

    def _load(self, client: str, fields: Fields, body: bytes) -> Json:
        if "model_id" in fields:
            return self._submit("load", client, fields, body)
        return self._create("create_from", client, fields, body)

    def _create(self, kind: Kind, client: str, fields: Fields, body: bytes) -> Json:
        request = self._service.create(client, kind, fields, body)
        return _future(request.id, request.owner)

    def _submit(self, kind: Kind, client: str, fields: Fields, body: bytes) -> Json:
        model_id = fields.required_text("model_id")
        seq = fields.required_integer("seq_id", least=1, most=MOST_SEQ)
        if len(body) > LONGEST_ORDER:
            return self._refused(client, model_id, seq, f"the body is longer than {LONGEST_ORDER} bytes")
        self._service.submit(client, kind, model_id, seq, 0, body)
        return _future(f"{model_id}:{seq}", model_id)

    def _info(self, client: str, fields: Fields, body: bytes) -> Json:
        model = self._service.model_of(client, fields.required_text("model_id"))
        served = self._service.model
        data = {"arch": served.architecture, "model_name": served.names[0], "tokenizer_id": served.tokenizer}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "model_name": served.names[0],
            "is_lora": model.spec is not None,
            "lora_rank": None if model.spec is None else model.spec.rank,
        }

    def _unload(self, client: str, fields: Fields, body: bytes) -> Json:
        model_id = fields.required_text("model_id")
        return _future(self._service.unload(client, model_id), model_id)

    def _create_sampler(self, client: str, fields: Fields, body: bytes) -> Json:
        sampler = self._service.new_sampler(client, fields)
        return {"sampling_session_id": sampler, "type": "create_sampling_session"}

    def _join(self, client: str, fields: Fields, body: bytes) -> Json:
        clones = self._service.join_sampler(client, fields.required_text("sampling_session_id"))
        return {"client_counter": clones, "type": "join_sampling_session"}

    def _cancel(self, client: str, fields: Fields, body: bytes) -> Json:
        request_id = fields.required_text("request_id")
        self._service.owned(client, request_id)
        self._service.cancel(request_id)
        return {}

    def _weights_info(self, client: str, fields: Fields, body: bytes) -> Json:
        row = self._service.checkpoint(client, fields.required_text("tinker_path"))
        spec = json.loads(row["spec"] or "null")
        parts = ("train_attn", "train_mlp", "train_unembed")
        adapter = {} if spec is None else {"lora_rank": spec["rank"], **{name: spec[name] for name in parts}}
        return {"base_model": self._service.model.names[0], "is_lora": spec is not None, **adapter}

    def _copy(self, client: str, fields: Fields, body: bytes) -> Json:
        return {"tinker_path": self._service.copy_checkpoint(client, fields)}

    def _search(self, client: str, fields: Fields, body: bytes) -> Json:
        limit = fields.integer("limit", 50, least=1, most=200)
        cursor, name = Fields(fields.mapping("cursor")), (fields.text("display_name") or "").lower()
        session_id, metadata = fields.text("session_id"), fields.mapping("user_metadata")
        states = {str(status.get("type")) for status in fields.objects("statuses")}
        last, last_id = _read_moment(cursor.text("last_created_at")), cursor.text("last_session_id", "")
        sessions = []
        for row in self._service.store.all(
            "SELECT * FROM sessions WHERE client = ? ORDER BY created DESC, id DESC", client
        ):
            user_metadata = json.loads(row["metadata"])
            named = name and all(word in (row["display_name"] or "").lower() for word in name.split())
            if (session_id or name) and not (row["id"] == session_id or named):
                continue
            if states and _session_status(row)["type"] not in states:
                continue
            if last is not None and (_moment(row["created"]), row["id"]) >= (last, last_id):
                continue
            if any(user_metadata.get(key) != value for key, value in metadata.items()):
                continue
            sessions.append(row)
        page = sessions[:limit]
        next_cursor = None
        if len(sessions) > limit:
            next_cursor = {"last_created_at": _time(page[-1]["created"]), "last_session_id": page[-1]["id"]}
        return {"sessions": [self._summary(row) for row in page], "next_cursor": next_cursor}

    def _summary(self, row: Row) -> dict[str, Any]:
        kept = self._service.store.one(
            "SELECT COUNT(*) AS number, COALESCE(SUM(size), 0) AS size FROM checkpoints JOIN models "
            "ON models.id = checkpoints.model WHERE models.session = ?",
            row["id"],
        )
        return {
            "session_id": row["id"],
            "created_at": _time(row["created"]),
            "owner": row["client"],
            "project_id": row["project"] or "",
            "status": _session_status(row),
            "checkpoints_count": kept["number"],
            "checkpoint_storage_bytes": kept["size"],
            "display_name": row["display_name"],
            "user_metadata": json.loads(row["metadata"]),
        }

    # Handlers of paths

    def _capabilities(self, client: str, fields: Fields, body: bytes) -> Json:
        served = self._service.model
        models = [
            {"model_name": name, "max_context_length": served.context, "trainable": True, "sampleable": True}
            for name in served.names
        ]
        refused = sorted((*_REFUSED, "audio", "images"))
        return {"supported_models": models, "unsupported": refused}

    def _sampler(self, client: str, fields: Fields, body: bytes) -> Json:
        row = self._service.sampler(client, fields.required_text("sampler"))
        base = self._service.model.names[0]
        return {"sampler_id": row["id"], "base_model": base, "model_path": row["path"]}

    def _sessions(self, client: str, fields: Fields, body: bytes) -> Json:
        limit, offset = _page(fields)
        rows = self._service.store.all(
            "SELECT id FROM sessions WHERE client = ? ORDER BY created DESC LIMIT ? OFFSET ?", client, limit, offset
        )
        return {"sessions": [row["id"] for row in rows]}

    def _session(self, client: str, fields: Fields, body: bytes) -> Json:
        row = self._service.session(client, fields.required_text("session"))
        store = self._service.store
        runs = store.all("SELECT id FROM models WHERE session = ? ORDER BY rowid", row["id"])
        samplers = store.all("SELECT id FROM samplers WHERE session = ? ORDER BY rowid", row["id"])
        return {
            "training_run_ids": [run["id"] for run in runs],
            "sampler_ids": [sampler["id"] for sampler in samplers],
            "user_metadata": json.loads(row["metadata"]),
            "display_name": row["display_name"],
        }

    def _project(self, client: str, fields: Fields, body: bytes) -> Json:
        session = self._service.session(client, fields.required_text("session"))
        project = fields.required_text("project_id")
        self._service.store.run("UPDATE sessions SET project = ? WHERE id = ?", project, session["id"])
        return {}

    def _runs(self, client: str, fields: Fields, body: bytes) -> Json:
        limit, offset = _page(fields)
        project = fields.text("project_id")
        rows = self._service.store.all(
            "SELECT models.* FROM models JOIN sessions ON sessions.id = models.session WHERE models.client = ? "
            "AND (? IS NULL OR project = ?) ORDER BY models.rowid DESC",
            client,
            project,
            project,
        )
        page = [self._run_entry(row) for row in rows[offset : offset + limit]]
        return {"training_runs": page, "cursor": _cursor(offset, limit, len(rows))}

    def _run(self, client: str, fields: Fields, body: bytes) -> Json:
        return self._run_entry(self._client_run(client, fields))

    def _run_checkpoints(self, client: str, fields: Fields, body: bytes) -> Json:
        run = self._client_run(client, fields)["id"]
        rows = self._service.store.all("SELECT * FROM checkpoints WHERE model = ? ORDER BY created", run)
        return {"checkpoints": [_checkpoint_entry(row) for row in rows]}

    def _checkpoints(self, client: str, fields: Fields, body: bytes) -> Json:
        limit, offset = _page(fields)
        rows = self._service.store.all("SELECT * FROM checkpoints WHERE client = ? ORDER BY created DESC", client)
        page = [_checkpoint_entry(row) for row in rows[offset : offset + limit]]
        return {"checkpoints": page, "cursor": _cursor(offset, limit, len(rows))}

    def _delete(self, client: str, fields: Fields, body: bytes) -> Response:
        self._service.delete_checkpoint(client, _path(fields))
        return Response(status_code=204)

    def _ttl(self, client: str, fields: Fields, body: bytes) -> Json:
        path = self._service.checkpoint(client, _path(fields))["path"]
        ttl = fields.integer("ttl_seconds", None, least=SHORTEST_TTL, most=LONGEST_TTL)
        expires = None if ttl is None else datetime.now(UTC).timestamp() + ttl
        self._service.store.run("UPDATE checkpoints SET expires = ? WHERE path = ?", expires, path)
        return {}

    def _client_run(self, client: str, fields: Fields) -> Row:
        run = fields.required_text("run")
        row = self._service.store.fetch_one("SELECT * FROM models WHERE id = ? AND client = ?", run, client)
        if row is None:
            raise RequestError(f"there is no training run {run[:200]}", status=404)
        return row

    def _run_entry(self, row: Row) -> dict[str, Any]:
        spec = json.loads(row["spec"] or "null")
        return {
            "training_run_id": row["id"],
            "base_model": self._service.model.names[0],
            "model_owner": row["client"],
            "is_lora": spec is not None,
            "lora_rank": None if spec is None else spec["rank"],
            "last_request_time": _time(row["last_request"]),
            "last_checkpoint": self._last_checkpoint(row["id"], "weights"),
            "last_sampler_checkpoint": self._last_checkpoint(row["id"], "sampler_weights"),
            "user_metadata": json.loads(row["metadata"] or "null"),
        }

    def _last_checkpoint(self, model: str, kind: str) -> dict[str, Any] | None:
        row = self._service.store.fetch_one(
            "SELECT * FROM checkpoints WHERE model = ? AND kind = ? ORDER BY created DESC LIMIT 1", model, kind
        )
        return None if row is None else _checkpoint_entry(row)


def _future(request_id: str, model_id: str) -> Json:
    return {"request_id": request_id, "model_id": model_id}


def _path(fields: Fields) -> str:
    return f"tinker://{fields.text('run')}/{fields.text('kind')}/{fields.text('name')}"


def _page(fields: Fields) -> tuple[int, int]:
    """Limit and offset of a list, which come as texts in the query."""

    def number(name: str, default: int, most: int) -> int:
        text = str(fields.value(name, default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= most):
            raise RequestError(f"{name} has to be a whole number from 0 to {most}, not {text[:40]!r}", param=name)
        return int(text)

    return number("limit", 20, 1000), number("offset", 0, 10**8)


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _checkpoint_entry(row: Row) -> dict[str, Any]:
    kind, name = row["path"].rsplit("/", 2)[1:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": "training" if kind == "weights" else "sampler",
        "time": _time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["size"],
        "public": False,
        "user_metadata": json.loads(row["metadata"] or "null"),
        "expires_at": None if row["expires"] is None else _time(row["expires"]),
    }


def _session_status(row: Row) -> dict[str, Any]:
    match row["finished"]:
        case None:
            return {"type": "active"}
        case "expired":
            return {"type": "cancelled", "detail": row["detail"]}
        case reason:
            return {"type": "client_finished", "reason": {"type": reason}, "detail": row["detail"]}


def _time(seconds: float) -> str:
    return _moment(seconds).isoformat()


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _read_moment(time: str | None) -> datetime | None:
    try:
        moment = None if time is None else datetime.fromisoformat(time)
    except ValueError:
        moment = datetime.min
    if moment is not None and moment.tzinfo is None:
        raise RequestError(f"cursor.last_created_at = {str(time)[:40]!r} is no time with a time zone", param="cursor")
    return moment
