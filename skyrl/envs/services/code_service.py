"""The sandbox as an HTTP service, on a machine that can run it.

    POST /run     {"program": "print(input())", "stdin": "<base64>", "limits": {"seconds": 5, "memory_bytes": 1e9, ...}}
         -> {"ended": "exit", "code": 0, "stdout": "<base64>", "stderr": "<base64>"}
    GET  /health  -> {"tier": "bwrap", "at_once": 8}

The fields of `limits` are those of `ResourceLimits`; a value above the service's limit is answered with 400. Programs
beyond `at_once` wait; one whose client hangs up is ended. Without a token, only this machine is served; with one, every
request must carry it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import attrs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl.errors import ProcessError, RequestError
from skyrl.processes.service_app import ServiceThreads, json_object, post_route, service_app
from skyrl.sandbox.sandbox import Ran, ResourceLimits, Sandbox

MOST = ResourceLimits(seconds=60.0, cpu_seconds=60, memory_bytes=4 << 30, output_bytes=2 << 20, processes=64)
"""Limits that no request may exceed, unless the service is configured with others."""


def code_app(sandbox: Sandbox, at_once: int, token: str | None = None, most: ResourceLimits = MOST) -> Starlette:
    """The service, for any ASGI server. With a token, every request needs `Authorization: Bearer TOKEN`."""
    workers = ServiceThreads(at_once, "skyrl-code")

    async def run(request: Request, body: bytes) -> JSONResponse:
        program, stdin, limits = question_of(json_object(body), most)
        try:
            return JSONResponse(
                answer_of(await workers.run(lambda gone: sandbox.run(program, stdin, limits, until=gone.fileno())))
            )
        except ProcessError as error:
            raise RequestError(str(error), status=503) from error

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"tier": sandbox.tier, "at_once": at_once})

    return service_app([post_route("/run", run), Route("/health", health)], token=token)


def question_of(body: Mapping[str, object], most: ResourceLimits) -> tuple[str, bytes, ResourceLimits]:
    """Program, standard input and limits of one request. Raises `RequestError`."""
    program = body.get("program")
    if not isinstance(program, str):
        raise RequestError("the body has to be an object with the text 'program'")
    try:
        stdin = base64.b64decode(str(body.get("stdin", "")), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("'stdin' has to be base64") from None
    return program, stdin, _limits(body.get("limits", {}), most)


def _limits(limits: object, most: ResourceLimits) -> ResourceLimits:
    if not isinstance(limits, dict):
        raise RequestError("'limits' has to be an object")
    known = {field.name: field for field in attrs.fields(ResourceLimits)}
    for name, value in limits.items():
        if name not in known:
            raise RequestError(f"there is no limit {name!r}; available: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= getattr(most, name):
            raise RequestError(f"the limit {name} has to be a number above 0 and up to {getattr(most, name)}")
    plain = {name: value if name == "seconds" else int(value) for name, value in limits.items()}
    return ResourceLimits(**plain)


def answer_of(ran: Ran) -> dict[str, Any]:
    """The JSON response for a program that ran."""
    out, err = (base64.b64encode(item).decode() for item in (ran.stdout, ran.stderr))
    return {"ended": ran.ended, "code": ran.code, "stdout": out, "stderr": err}
