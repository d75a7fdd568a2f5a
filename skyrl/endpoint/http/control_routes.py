"""Routes through which a training run controls the engines. They are those of vLLM's server, so `backend = "http"`
works with both.

POST /pause?mode=wait|keep&clear_cache=true|false    -> requests wait, running ones end or stand still
POST /collective_rpc  skyrl_load_weights              -> the engines read the weights that are announced
POST /update_weight_version {"new_version": "3"}      -> tokens from now on are of version 3
POST /resume
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from skyrl.endpoint.control import EngineControl
from skyrl.endpoint.fields import Fields
from skyrl.errors import RequestError, WeightSyncError
from skyrl.inference.engine import InFlight
from skyrl.processes.service_app import body_of, json_object
from skyrl.weight_receiver.incoming_weights import from_plain

Handler = Callable[[Request, Fields], Awaitable[object]]
"""Answers a request, given the fields of its body: with JSON, or text."""

Guarded = Callable[[Callable[[Request], Awaitable[Response]]], Callable[[Request], Awaitable[Response]]]
"""Wraps a handler with access control: other requests get an error response."""


class ControlRoutes:
    """The control routes and their handlers, which run on the event loop of the engines."""

    def __init__(self, control: EngineControl, on_engines: Callable[..., Awaitable[Any]]) -> None:
        """`on_engines(call)` awaits `call()` on the event loop of the engines."""
        self._control, self._on_engines = control, on_engines

    def routes(self, guarded: Guarded) -> list[Route]:
        """The routes for clients that `guarded` lets through."""
        answers: Mapping[tuple[str, str], Handler] = {
            ("GET", "/weight_info"): _showing(lambda: {"weight_version": str(self._control.version)}),
            ("GET", "/is_paused"): _showing(lambda: {"is_paused": self._control.is_paused}),
            ("GET", "/get_world_size"): _showing(lambda: {"world_size": self._control.workers}),
            ("GET", "/metrics"): self._metrics,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/collective_rpc"): self._rpc,
            # Engines drop old computations as soon as they load weights, and keep no process group.
            ("POST", "/reset_prefix_cache"): _showing(lambda: {"success": True}),
            ("POST", "/update_weight_version"): self._name_weights,
            ("POST", "/shutdown_weight_transfer_engine"): _showing(lambda: {"success": True}),
        }

        def route(method: str, path: str, answer: Handler) -> Route:
            async def respond(request: Request) -> Response:
                body = await body_of(request)
                fields = Fields(json_object(body) if body else {})
                content = await answer(request, fields)
                fields.finish()
                return PlainTextResponse(content) if isinstance(content, str) else JSONResponse(content)

            return Route(path, guarded(respond), methods=[method])

        return [route(*place, answer) for place, answer in answers.items()]

    async def _metrics(self, request: Request, body: Fields) -> object:
        """Prometheus' text format, under the metric names that routers in front of vLLM read."""
        running, waiting = await self._on_engines(self._control.load)
        return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"

    async def _pause(self, request: Request, body: Fields) -> object:
        in_flight: InFlight
        match request.query_params.get("mode", "abort"), request.query_params.get("clear_cache", "true"):
            case "wait", _:
                in_flight = "finish"
            case "keep", "true":
                in_flight = "recompute"
            case "keep", "false":
                in_flight = "keep"
            case _:
                raise RequestError("mode has to be wait or keep, and clear_cache true or false", param="mode")
        await self._on_engines(lambda: self._control.pause(in_flight))
        return {"status": "paused"}

    async def _resume(self, request: Request, body: Fields) -> object:
        await self._on_engines(self._control.resume)
        return {"status": "resumed"}

    async def _name_weights(self, request: Request, body: Fields) -> object:
        version = body.text("new_version", "") or ""
        if not version.isdecimal():
            raise RequestError("new_version has to be a whole number, as a string", param="new_version")
        self._control.name_weights(int(version))
        return {"success": True, "new_version": version}

    async def _rpc(self, request: Request, body: Fields) -> object:
        """Calls of `WorkerExtension`, which is an extension of the workers in vLLM."""
        method, arguments = body.text("method"), body.value("args", [])
        body.ignore("timeout")
        match method, arguments:
            case "skyrl_patch_sampler", []:
                return {"results": [None]}
            case "skyrl_update_group", []:
                return {"results": [""]}
            case "skyrl_load_weights", [dict(announced), dict()]:
                try:
                    incoming = from_plain(announced)
                except WeightSyncError as error:
                    raise RequestError(str(error), param="args") from error
                return {"results": [await self._on_engines(lambda: self._control.load_weights(incoming))]}
        raise RequestError("the engines know no such call, or not with these arguments", param="method")


def _showing(content: Callable[[], object]) -> Handler:
    """A handler that reads nothing of its request."""

    async def answer(request: Request, body: Fields) -> object:
        return content()

    return answer
