"""The routes of the endpoint, their access control, and error responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from attrs import evolve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from skyrl.endpoint.anthropic import count_tokens, messages
from skyrl.endpoint.chat import chat
from skyrl.endpoint.completions import complete
from skyrl.endpoint.control_routes import ControlRoutes
from skyrl.endpoint.doors import Doors
from skyrl.endpoint.fields import Fields, body_object
from skyrl.endpoint.generate import generate
from skyrl.endpoint.policy import Policy
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.responses import responses
from skyrl.endpoint.trajectories import PlayedTrajectory, Trajectories
from skyrl.errors import RequestError, RunError
from skyrl.processes.service import LONGEST_BODY, body_of

MOST_HEADERS = 200
"""Largest number of headers of one request."""

RETRY_SECONDS = 1
"""Seconds after which a refused client should try again."""

Respond = Callable[[Fields, Policy, PlayedTrajectory | None], Awaitable[Reply]]


def endpoint_app(
    policy: Policy, trajectories: Trajectories, doors: Doors, control: ControlRoutes | None = None
) -> Starlette:
    """The endpoint for any ASGI server. Keys are sent as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    answers = _Answers(policy, trajectories, doors)
    post = answers.to_posts
    return Starlette(
        routes=[
            Route("/health", _health),
            Route("/v1/models", answers.to_models),
            Route("/v1/chat/completions", post(chat), methods=["POST"]),
            Route("/v1/completions", post(complete), methods=["POST"]),
            Route("/v1/responses", post(responses), methods=["POST"]),
            Route("/v1/messages", post(messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", post(count_tokens), methods=["POST"]),
            Route("/inference/v1/generate", post(generate), methods=["POST"]),
            *(() if control is None else control.routes(answers.to_clients_alone, _body)),
        ],
        exception_handlers={404: _no_route, 405: _no_route},
    )


class _Answers:
    """Handlers of the routes, for requests that `doors` admits."""

    def __init__(self, policy: Policy, trajectories: Trajectories, doors: Doors) -> None:
        self._policy, self._trajectories, self._doors = policy, trajectories, doors

    def to_posts(self, answer: Respond) -> Callable[[Request], Awaitable[Response]]:
        """A handler that answers request bodies, and cancels the work if the client disconnects."""

        async def respond(request: Request) -> Response:
            try:
                trajectory = self._trajectory_of(request)
                body = Fields(body_object(await _body(request)))
                reply = await _while_connected(request, _begun(answer(body, self._policy, trajectory)))
            except RequestError as error:
                return _refusal(error)
            return JSONResponse(reply.body) if reply.events is None else _EventStream(reply)

        return respond

    def to_clients_alone(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler for clients only: agents and browser pages are refused."""

        async def respond(request: Request) -> Response:
            try:
                if self._trajectory_of(request) is not None:
                    raise RequestError("agents may not control the engines", status=403)
                if "origin" in request.headers:
                    raise RequestError("web pages may not control the engines", status=403)
                return await answer(request)
            except RequestError as error:
                return _refusal(error)
            except RunError as error:
                return _refusal(RequestError(f"the engines failed: {error}", status=500, code="engine_error"))

        return respond

    async def to_models(self, request: Request) -> Response:
        """List the model names that requests may use."""
        try:
            self._trajectory_of(request)
        except RequestError as error:
            return _refusal(error)
        served = self._policy.served
        data = [_model(self._policy, name) for name in (*served.names, *served.adapters)]
        return JSONResponse({"object": "list", "data": data})

    def _trajectory_of(self, request: Request) -> PlayedTrajectory | None:
        """The trajectory of an agent's request; None for a client. Raises `RequestError` if the request is not
        admitted.
        """
        if len(request.headers) > MOST_HEADERS:
            raise RequestError(f"the request has more than {MOST_HEADERS} headers", status=431)
        key = _key(request)
        trajectory = self._trajectories.of(key)
        if trajectory is None and not self._doors.open_to_clients:
            raise RequestError("only the agents of this run are served", status=401, code="invalid_api_key")
        if trajectory is None and not self._doors.opened_by(key):
            raise RequestError("this endpoint requires its token as the API key", status=401, code="invalid_api_key")
        return trajectory


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _key(request: Request) -> str | None:
    bearer = request.headers.get("authorization", "")
    return bearer[7:] if bearer.lower().startswith("bearer ") else request.headers.get("x-api-key")


async def _body(request: Request) -> bytes:
    """Read the body of a request. Raises `RequestError` if it is too large or does not arrive."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > LONGEST_BODY:
        raise RequestError(f"the body is longer than {LONGEST_BODY} bytes", status=413)
    try:
        return await body_of(request)
    except ValueError as error:
        raise RequestError(str(error), status=413 if "longer" in str(error) else 400) from error


async def _begun(answer: Awaitable[Reply]) -> Reply:
    """The reply; for a stream, waits for its first event, so that earlier errors are answered with a status code."""
    reply = await answer
    if reply.events is None:
        return reply
    return evolve(reply, events=_with_first(await anext(reply.events), reply.events))


async def _with_first(first: Event, events: Events) -> Events:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()


class _EventStream(StreamingResponse):
    """Sends events as they come, and closes them when they end or the client disconnects."""

    def __init__(self, reply: Reply) -> None:
        assert reply.events is not None
        self._events, self._ends_with_done = reply.events, reply.ends_with_done
        super().__init__(self._lines(), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield event.line
        except RequestError as error:  # too late for a status code
            yield Event(_error(error), "error").line
            return
        if self._ends_with_done:
            yield b"data: [DONE]\n\n"


async def _while_connected(request: Request, answer: Awaitable[Reply]) -> Reply:
    """The reply; raises `RequestError` and cancels the work if the client disconnects first."""
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("the client hung up", status=499)
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait([working, watching])


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
    said = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"type": "error", "error": said}  # `type` is for Anthropic's clients


def _refusal(error: RequestError) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status in (429, 503) else None
    return JSONResponse(_error(error), error.status, headers)


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    return _refusal(RequestError(f"there is no {request.method} {request.url.path[:200]} here", status=404))
