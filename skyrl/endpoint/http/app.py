"""The routes of the endpoint, their access control, and error responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from skyrl.endpoint.client_access import ClientAccess
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.http.control_routes import ControlRoutes
from skyrl.endpoint.policy import Policy
from skyrl.endpoint.protocols.anthropic import count_tokens, messages
from skyrl.endpoint.protocols.chat import chat
from skyrl.endpoint.protocols.completions import complete
from skyrl.endpoint.protocols.generate import generate
from skyrl.endpoint.protocols.responses import responses
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.trajectories import PlayedTrajectory, Trajectories
from skyrl.errors import RequestError, RunError
from skyrl.processes.service_app import is_key, json_object, key_of, post_route, service_app

RETRY_SECONDS = 1
"""Seconds after which a refused client should try again."""

Respond = Callable[[Fields, Policy], Awaitable[Reply]]


def endpoint_app(
    policy: Policy, trajectories: Trajectories, access: ClientAccess, control: ControlRoutes | None = None
) -> Starlette:
    """The endpoint for any ASGI server. Keys are sent as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    answers = _Answers(policy, trajectories, access)
    posts: dict[str, Respond] = {
        "/v1/chat/completions": chat,
        "/v1/completions": complete,
        "/v1/responses": responses,
        "/v1/messages": messages,
        "/v1/messages/count_tokens": count_tokens,
        "/inference/v1/generate": generate,
    }
    return service_app(
        [
            Route("/health", _health),
            Route("/v1/models", answers.to_models),
            Route("/v1/models/{name:path}", answers.to_model),
            Route("/v1/responses/{number}", answers.to_stored_response),
            *(post_route(path, answers.to(answer)) for path, answer in posts.items()),
            *(() if control is None else control.routes(answers.to_clients_alone)),
        ],
        token=access.token,
        admit=answers.admit,
        refusal=_refusal,
    )


class _Answers:
    """Handlers of the routes, for requests that `access` admits."""

    def __init__(self, policy: Policy, trajectories: Trajectories, access: ClientAccess) -> None:
        self._policy, self._trajectories, self._access = policy, trajectories, access

    def to(self, answer: Respond) -> Callable[[Request, bytes], Awaitable[Response]]:
        """A handler of the bodies of POST requests."""

        async def respond(request: Request, body: bytes) -> Response:
            reply = await answer(Fields(json_object(body)), self._policy.of(self._trajectory_of(request)))
            if reply.events is None:
                return JSONResponse(reply.body)
            first = await anext(reply.events)  # an error before it is answered with a status code
            return _EventStream(first, reply.events, ends_with_done=reply.ends_with_done)

        return respond

    def to_clients_alone(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler for clients only: agents and browser pages are refused."""

        async def respond(request: Request) -> Response:
            if self._trajectory_of(request) is not None:
                raise RequestError("agents may not control the engines", status=403)
            if "origin" in request.headers:
                raise RequestError("web pages may not control the engines", status=403)
            try:
                return await answer(request)
            except RunError as error:
                raise RequestError(f"the engines failed: {error}", status=500, code="engine_error") from error

        return respond

    async def to_models(self, request: Request) -> Response:
        """List the model names that requests may use."""
        served = self._policy.served
        data = [_model(self._policy, name) for name in (*served.names, *served.adapters)]
        return JSONResponse({"object": "list", "data": data})

    async def to_model(self, request: Request) -> Response:
        """One of the model names that requests may use."""
        return JSONResponse(_model(self._policy, self._policy.refuse_other_models(request.path_params["name"])))

    async def to_stored_response(self, request: Request) -> Response:
        """A response that a request may continue."""
        stored = self._policy.of(self._trajectory_of(request)).stored
        return JSONResponse(stored.response(request.path_params["number"]))

    def admit(self, request: Request) -> None:
        """Raises `RequestError` for a request of neither a client that may be answered nor a running trajectory."""
        key = key_of(request)
        if self._trajectories.of(key) is None and not self._access.open_to_clients:
            raise RequestError("only the agents of this run are served", status=401, code="invalid_api_key")
        if self._trajectories.of(key) is None and not is_key(self._access.token, key):
            raise RequestError("this endpoint requires its token as the API key", status=401, code="invalid_api_key")

    def _trajectory_of(self, request: Request) -> PlayedTrajectory | None:
        """The trajectory of an agent's request; None for a client. Raises `RequestError` if it has ended."""
        return self._trajectories.of(key_of(request))


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


class _EventStream(StreamingResponse):
    """Sends events as they come, and closes them when they end or the client disconnects."""

    def __init__(self, first: Event, events: Events, *, ends_with_done: bool) -> None:
        self._first, self._events, self._ends_with_done = first, events, ends_with_done
        super().__init__(self._lines(), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            yield self._first.line
            async for event in self._events:
                yield event.line
        except RequestError as error:  # too late for a status code
            yield Event(_error(error), "error").line
            return
        if self._ends_with_done:
            yield b"data: [DONE]\n\n"


def _model(policy: Policy, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": now(),
        "owned_by": "skyrl",
        "max_model_len": policy.served.max_model_len,
    }


def _error(error: RequestError) -> Json:
    """The body of an error response, in the form that OpenAI's and Anthropic's clients expect."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    content = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"type": "error", "error": content}  # `type` is for Anthropic's clients


def _refusal(error: RequestError) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status in (429, 503) else None
    return JSONResponse(_error(error), error.status, headers)
