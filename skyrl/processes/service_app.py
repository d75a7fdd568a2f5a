"""The ASGI application of every HTTP service of this package: `service_app` makes all of them, and `ServiceThreads` are
the threads on which a service works for its clients.

    request -> RULES -> token -> route -> answer, or a `RequestError` in the service's own form

No route is reached, and nothing of a body is read, before the rules and the token. Where no token is required, a
page of another site in the user's browser could send requests to this machine and, if the site's name is rebound to
this machine, read the answers. Such requests are refused: by their Host, their Origin, or a body that is not declared
as JSON.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import select
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from attrs import frozen
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl.errors import RequestError
from skyrl.processes.addresses import is_loopback
from skyrl.processes.answers import collected

T = TypeVar("T")

LONGEST_BODY = 4 << 20
"""Maximum size of a request's body, in bytes."""

BODY_SECONDS = 60.0
"""Seconds in which the body of a request must arrive after its headers."""

MOST_HEADERS = 200
"""Largest number of headers of one request."""

Admit = Callable[[Request], Response | None]
"""Access control of a service: None admits a request, a response answers it at once. May raise `RequestError`."""

Refusal = Callable[[RequestError], Response]
"""The response to a request that is refused."""


def plain_refusal(error: RequestError) -> Response:
    """A refusal as `{"error": "..."}`."""
    return JSONResponse({"error": str(error)}, error.status)


def service_app(
    routes: Sequence[BaseRoute],
    *,
    token: str | None,
    admit: Admit | None = None,
    refusal: Refusal = plain_refusal,
    headers: Mapping[str, str] | None = None,
) -> Starlette:
    """A service for any ASGI server. Every request, to any path, needs the token, if there is one: as
    `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`.

    `admit` replaces this check. `headers` are added to every response. A `RequestError` of a route is answered by
    `refusal`.
    """

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return refusal(error)

    def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"there is no {request.method} {request.url.path[:200]} here"
        return refusal(RequestError(reason, status=error.status_code))

    def failed(request: Request, error: Exception) -> Response:
        return refusal(RequestError("the service failed: see its log", status=500))

    def require_token(request: Request) -> None:
        if not is_key(token, key_of(request)):
            raise RequestError("this service requires its token: Authorization: Bearer ...", status=401)

    guard = Middleware(
        _Guard,
        rules=RULES if token else (*RULES, *RULES_WITHOUT_TOKEN),
        admit=admit or require_token,
        refusal=refusal,
        headers=headers or {},
    )
    handlers: dict[Any, Callable[[Request, Exception], Response]] = {
        RequestError: refused,
        404: no_route,
        405: no_route,
        Exception: failed,
    }
    return Starlette(routes=list(routes), middleware=[guard], exception_handlers=handlers)


def post_route(
    path: str,
    answer: Callable[[Request, bytes], Awaitable[Response]],
    *,
    longest: int = LONGEST_BODY,
    cut: bool = False,
) -> Route:
    """A route that answers the bodies of POST requests, of at most `longest` bytes: a longer one is refused, or, with
    `cut`, answered with its first `longest + 1` bytes. The work is cancelled if its client hangs up.
    """

    async def respond(request: Request) -> Response:
        body = await (_cut_body(request, longest + 1) if cut else body_of(request, longest=longest))
        return await _respond_while_connected(request, answer(request, body))

    return Route(path, respond, methods=["POST"])


def key_of(request: Request) -> str | None:
    """The key that a request carries. The name of the scheme is case-insensitive (RFC 9110, 11.1)."""
    bearer = request.headers.get("authorization", "")
    return bearer[7:] if bearer.lower().startswith("bearer ") else request.headers.get("x-api-key")


def is_key(token: str | None, key: str | None) -> bool:
    """Whether the key is the token, or none is required."""
    return not token or secrets.compare_digest((key or "").encode(), token.encode())


async def body_of(request: Request, *, longest: int = LONGEST_BODY) -> bytes:
    """Body of a request. Raises `RequestError` if it has more than `longest` bytes, does not come in time, or its
    sender hung up.
    """
    too_long = RequestError(f"the body is longer than {longest} bytes", status=413)
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > longest):
        raise too_long
    with _said_if_incomplete():
        body = await collected(request.stream(), longest=longest, seconds=BODY_SECONDS)
    if body is None:
        raise too_long
    return body


async def _cut_body(request: Request, most: int) -> bytes:
    """The first bytes of a body. The rest is read and dropped: only then does the sender read the answer."""
    content = bytearray()
    with _said_if_incomplete():
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                content += piece[: most - len(content)]
    return bytes(content)


@contextmanager
def _said_if_incomplete() -> Iterator[None]:
    try:
        yield
    except ClientDisconnect:
        raise RequestError("the sender hung up before the end of the body") from None
    except TimeoutError:
        raise RequestError(f"the body did not come within {BODY_SECONDS:g} s") from None


def json_object(body: bytes) -> dict[str, Any]:
    """The object in a body. Raises `RequestError` for anything that is not UTF-8, not JSON or not an object, and for
    text that is not Unicode: half of a surrogate pair, which neither a tokenizer nor an answer can hold.
    """
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise RequestError(f"the body contains a lone surrogate: \\u{ord(error.object[error.start]):x}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError("the body has to be a JSON object")
    return content


def few_headers(request: Request) -> None:
    """A request has at most `MOST_HEADERS` headers."""
    if len(request.headers) > MOST_HEADERS:
        raise RequestError(f"the request has more than {MOST_HEADERS} headers", status=431)


def require_one_length(request: Request) -> None:
    """A body has one length. Of two, a proxy in front may read the other one (RFC 9112, 6.1)."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise RequestError("a request has a Content-Length or a Transfer-Encoding, not both", code="closes")


def require_local_host(request: Request) -> None:
    """A request without a token names this machine as its host, so that no other site's name leads here."""
    host = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        raise RequestError(
            f"without a token, only requests to localhost and 127.0.0.1 are answered, not to {host[:200]!r}"
        )


def refuse_other_sites(request: Request) -> None:
    """A request without a token comes from no page of another site."""
    origin = request.headers.get("origin")
    if origin is not None and origin != f"http://{request.headers.get('host', '')}":
        raise RequestError(f"without a token, no requests from pages of {origin[:200]!r} are answered", status=403)


def json_body(request: Request) -> None:
    """A body without a token is declared as JSON or protobuf, which a page of another site cannot do without asking
    first.
    """
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "application/x-protobuf"):
        raise RequestError("a body has to be JSON, with the header Content-Type: application/json", status=415)


RULES: tuple[Callable[[Request], None], ...] = (few_headers, require_one_length)
"""What holds for every request. A rule raises `RequestError`."""

RULES_WITHOUT_TOKEN: tuple[Callable[[Request], None], ...] = (require_local_host, refuse_other_sites, json_body)
"""What also holds where no token tells the user's programs from the pages in the user's browser."""


class _Guard:
    """Lets through what the rules and the access control of a service admit."""

    def __init__(
        self,
        app: ASGIApp,
        rules: Sequence[Callable[[Request], None]],
        admit: Admit,
        refusal: Refusal,
        headers: Mapping[str, str],
    ) -> None:
        self._app, self._rules, self._admit, self._refusal, self._headers = app, rules, admit, refusal, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        answer = self._answer(Request(scope)) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, sent)

    def _answer(self, request: Request) -> Response | None:
        try:
            for rule in self._rules:
                rule(request)
            return self._admit(request)
        except RequestError as error:
            answer = self._refusal(error)
            if error.code == "closes":
                answer.headers["Connection"] = "close"
            return answer


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


async def _respond_while_connected(request: Request, answer: Awaitable[Response]) -> Response:
    """The response; raises `RequestError` and cancels the work if the client disconnects first."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(answer), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("the client hung up", status=499)
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait([working, watching])


@frozen
class HangUp:
    """The end of a client. It has happened once the other end of `line` is closed."""

    line: socket.socket

    def fileno(self) -> int:
        """A descriptor that is readable once the client is gone."""
        return self.line.fileno()

    def has_happened(self) -> bool:
        """Whether the client is gone."""
        watch = select.poll()
        watch.register(self.line, select.POLLIN)
        return bool(watch.poll(0))


class ServiceThreads:
    """The threads of one service."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[HangUp], T]) -> T:
        """The result of `work` on one of the threads. If this call is cancelled, work that has not begun never does,
        and work that has begun learns from its argument that nobody waits for it any more.
        """
        caller_socket, worker_socket = socket.socketpair()
        with caller_socket:  # closes, and so tells the thread, also if this call is cancelled
            future = self._pool.submit(work, HangUp(worker_socket))
            future.add_done_callback(lambda _: worker_socket.close())
            return await asyncio.wrap_future(future)
