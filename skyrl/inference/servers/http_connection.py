"""JSON over HTTP to one inference server, with a deadline for every request and errors that name the server.

    connection = Connection("https://10.0.0.5:8000", token="...", most=256)
    answer = await connection.post("/pause", query={"mode": "wait"}, seconds=60)

A request that fails in transit, or that the server cannot take now (429, 502, 503, 504), is retried until its deadline
or its last attempt. The pauses are random parts of 0.1 s, then of twice as long each time, up to 5 s ("full jitter",
Brooker 2015). Redirects are not followed, and proxies of the environment are not used: requests go only to the
configured address, and only it sees the token. A streamed answer (server-sent events) is passed on event by event; a
stream that breaks off is requested again, from its beginning.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from skyrl.errors import ProcessError, ServerRefusal, UserError
from skyrl.processes.answers import BadAnswer, asked_to_wait, collected, display_value, read

if TYPE_CHECKING:
    import httpx  # a run without servers starts without it

T = TypeVar("T")

CONNECT_SECONDS = 10.0
"""Time limit for opening a connection, in seconds."""

BODY_SECONDS = 60.0
"""Time limit for the body of an answer, after its head, in seconds."""

LONGEST_ANSWER = 64 << 20
"""Largest answer that is read, in bytes."""

ATTEMPTS = 6
"""Largest number of attempts for one request."""

MOST_ATTEMPTS = 10**6
"""Number of attempts for a request that only its deadline ends."""

_REMEDY = "If it is not starting, start it, or correct generator.inference_engine.external_server_urls"

Listener = Callable[[object], None]
"""Callback for the events of one streamed answer, each decoded from JSON."""

_BUSY = frozenset({429, 502, 503, 504})
"""Status codes of a server that may accept the same request later."""

_OF_A_GATEWAY = frozenset({502, 504})
"""Status codes of a gateway whose server does not answer."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

_log = logging.getLogger(__name__)

_draws = random.Random()  # the global generator belongs to the run


class _Failure(Exception):
    """An attempt that failed and may be repeated; the server may ask for `wait` seconds before that. `misread` means
    that the server answers, but not in the form that its route has.
    """

    def __init__(self, why: str, wait: float = 0.0, *, misread: bool = False) -> None:
        super().__init__(why)
        self.why, self.wait, self.misread = why, wait, misread


class Connection:
    """Requests to one server. Used on one event loop."""

    def __init__(self, url: str, *, token: str | None = None, most: int = 64, starting: bool = False) -> None:
        """`url` has no path; `token` is sent as a bearer token; at most `most` connections are open at once. `starting`
        means that the caller has just started the server. Raises `UserError` for an address or a token that no request
        can carry.
        """
        self.url = url.rstrip("/")
        _refuse_unusable(self.url, token)
        self._token, self._most = token, most
        self._client: httpx.AsyncClient | None = None
        self._limits: dict[asyncio.Timeout, float] = {}
        """Deadlines of the requests in progress, with the seconds that were left when they were suspended."""
        self._suspended = False
        self._was_told, self._remedy = starting, "" if starting else f". {_REMEDY}"

    async def get(self, path: str, *, seconds: float, attempts: int = ATTEMPTS) -> object:
        """The answer to a GET request. Raises as `post`."""
        return await self._request(path, seconds, attempts, partial(self._attempt, "GET", path, None, {}, {}))

    async def read(
        self,
        kind: type[T],
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        seconds: float,
        query: Mapping[str, str] | None = None,
        attempts: int = ATTEMPTS,
    ) -> T:
        """The answer as an instance of `kind`; to a POST request if there is a `body`, else to a GET request. An answer
        that `kind` does not fit is a failed attempt. Raises as `post`.
        """
        method = "GET" if body is None else "POST"
        once = partial(self._attempt, method, path, body, query or {}, {})
        return await self._request(path, seconds, attempts, partial(_fitting, once, kind))

    async def check_health(self, path: str, *, seconds: float) -> None:
        """Returns when the server answers a GET request, in any way: one that is paused or loads weights may answer
        503. 502 and 504 are answers of a gateway in front of it. Raises as `post`.
        """

        async def once() -> None:
            async with self._send("GET", path, None, {}, {}) as response:
                if response.status_code in _OF_A_GATEWAY:
                    raise _Failure(f"it answers {response.status_code}")

        await self._request(path, seconds, MOST_ATTEMPTS, once)

    def suspend(self) -> None:
        """Stop the clocks of all requests, until `resume`: the server is paused and works on none."""
        if not self._suspended:
            self._suspended = True
            now = asyncio.get_running_loop().time()
            for limit in self._limits:
                self._limits[limit] = (limit.when() or now) - now
                limit.reschedule(None)

    def resume(self) -> None:
        """Let the clocks run again."""
        if self._suspended:
            self._suspended = False
            now = asyncio.get_running_loop().time()
            for limit, left in self._limits.items():
                limit.reschedule(now + left)

    async def wait_for_first(self, kind: type[T], path: str, *, seconds: float) -> T:
        """The answer to the first GET request, which may have to wait until the server has started; the reason for
        waiting is logged once. Raises as `read`.
        """
        once = partial(_fitting, partial(self._attempt, "GET", path, None, {}, {}), kind)

        async def asked() -> T:
            try:
                return await once()
            except _Failure as failure:
                if not self._was_told and not failure.misread:
                    self._was_told = True
                    _log.warning(
                        "the inference server %s does not answer (%s): waiting for it, up to %g s "
                        "(trainer.placement.start_timeout_seconds). %s",
                        *(self.url, failure.why, seconds, _REMEDY),
                    )
                raise

        try:
            return await self._request(path, seconds, MOST_ATTEMPTS, asked)
        except ProcessError as error:
            raise ProcessError(f"{error}{self._remedy}") from error

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        seconds: float,
        query: Mapping[str, str] | None = None,
        attempts: int = ATTEMPTS,
        headers: Mapping[str, str] | None = None,
    ) -> object:
        """The answer to a POST request with a JSON body, within `seconds` for all attempts together: decoded JSON, text
        if the server does not declare it as JSON, or None if it has no body.

        Raises `ServerRefusal` if the server refuses the request, `ProcessError` if no valid answer arrives in time.
        """
        return await self._request(
            path, seconds, attempts, partial(self._attempt, "POST", path, body or {}, query or {}, headers or {})
        )

    async def hear(
        self,
        path: str,
        body: Mapping[str, object],
        *,
        seconds: float,
        begin: Callable[[], Listener],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Pass the events of a streamed answer to a listener as they arrive; returns at its end (`[DONE]`). An answer
        that is not streamed is one event.

        `begin` creates the listener of each attempt. `seconds` limits the whole stream. Raises as `post`, and any error
        of a listener.
        """
        await self._request(path, seconds, ATTEMPTS, partial(self._events, path, body, headers or {}, begin))

    async def close(self) -> None:
        """Closes every connection; requests in progress fail."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _request(self, path: str, seconds: float, attempts: int, once: Callable[[], Awaitable[T]]) -> T:
        reason, failed, misread = "it did not answer", 0, 0
        limit = asyncio.timeout(None if self._suspended else seconds)
        try:
            async with limit:
                self._limits[limit] = seconds
                while True:
                    try:
                        return await once()
                    except _Failure as failure:
                        reason, failed, misread = failure.why, failed + 1, misread + failure.misread
                        if failed == attempts or misread == ATTEMPTS:
                            break
                        await asyncio.sleep(max(failure.wait, _pause(failed - 1)))
        except TimeoutError:
            raise ProcessError(
                f"the inference server {self.url} did not complete {path} within {seconds:g} s: {reason}"
            ) from None
        finally:
            self._limits.pop(limit, None)
        raise ProcessError(f"the inference server {self.url} failed {failed} times at {path}: {reason}")

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> AsyncIterator[httpx.Response]:
        """The head of an answer. Transport errors are raised as `_Failure`."""
        import httpx

        try:
            async with self._open().stream(
                method, self.url + path, json=body, params=dict(query) or None, headers=dict(headers)
            ) as response:
                yield response
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise _Failure(f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}") from error

    async def _attempt(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> object:
        async with self._send(method, path, body, query, headers) as response:
            content = await self._content(response)
        return self._parse_response(response, path, content)

    async def _events(
        self, path: str, body: Mapping[str, object], headers: Mapping[str, str], begin: Callable[[], Listener]
    ) -> None:
        listen = begin()
        async with self._send("POST", path, body, {}, headers) as response:
            if not response.is_success or "event-stream" not in response.headers.get("content-type", ""):
                listen(self._parse_response(response, path, await self._content(response)))
                return
            async with aclosing(_lines(response)) as lines:
                async for line in lines:
                    if line == b"data: [DONE]":
                        return
                    if line.startswith(b"data:"):
                        listen(_event(line.removeprefix(b"data:")))
        raise _Failure("its stream ended before its last event")

    async def _content(self, response: httpx.Response) -> bytes:
        try:
            content = await collected(response.aiter_bytes(), longest=LONGEST_ANSWER, seconds=BODY_SECONDS)
        except TimeoutError:
            raise _Failure(f"its answer was still incomplete after {BODY_SECONDS:g} s") from None
        if content is None:
            raise _Failure(f"it answers with more than {LONGEST_ANSWER} bytes")
        return content

    def _parse_response(self, response: httpx.Response, path: str, content: bytes) -> object:
        import httpx

        status = response.status_code
        if status in _BUSY:
            raise _Failure(f"it answers {status}", asked_to_wait(response.headers.get("retry-after", "")))
        if response.has_redirect_location:
            where = httpx.URL(response.headers["location"]).host or "another path"
            raise ProcessError(f"the inference server {self.url} redirects {path} to {where}, which is not followed")
        if status >= 500:
            raise _Failure(f"it answers {status}: {_message(content)}")
        if status >= 400:
            raise ServerRefusal(
                f"the inference server {self.url} refuses {path} ({status}): {_message(content)}", status
            )
        if not content:
            return None
        if "json" not in response.headers.get("content-type", ""):
            return content.decode("utf-8", "replace")  # text for people; a caller that expects JSON checks the type
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _Failure(f"its answer is not JSON: {type(error).__name__}") from error

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            self._client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                verify=ssl.create_default_context(),
                trust_env=False,
                follow_redirects=False,
                limits=httpx.Limits(max_connections=self._most, max_keepalive_connections=self._most),
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            )
        return self._client


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Whole lines of a stream."""
    unfinished = b""
    async for piece in response.aiter_bytes():
        *lines, unfinished = (unfinished + piece).split(b"\n")
        if max(map(len, (*lines, unfinished))) > LONGEST_ANSWER:
            raise _Failure(f"it sends an event of more than {LONGEST_ANSWER} bytes")
        for line in lines:
            yield line.rstrip(b"\r")


def _event(content: bytes) -> object:
    try:
        event = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _Failure(f"an event of its stream is not JSON: {type(error).__name__}") from error
    if isinstance(event, dict) and event.get("error"):
        raise _Failure(f"its stream ends with an error: {_message(content)}")
    return event


def _pause(attempt: int) -> float:
    return _draws.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt))


async def _fitting(once: Callable[[], Awaitable[object]], kind: type[T]) -> T:
    """The answer of an attempt, as an instance of `kind`."""
    try:
        return read(await once(), kind)
    except BadAnswer as error:
        raise _Failure(f"it answers {error}", misread=True) from error


def _refuse_unusable(url: str, token: str | None) -> None:
    """Raises `UserError` for an address or a token that no request can carry."""
    import httpx

    try:
        usable = urlsplit(url).port != 0 and httpx.URL(url).host != ""
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise UserError(f"{url} is no address of an inference server: write http://HOST:PORT, with a port up to 65535")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UserError(f"the token of the inference server {url} has characters that no HTTP header can carry")


def _message(content: bytes) -> str:
    """The server's own message about an error, in one line."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        message = content[:200].decode("utf-8", "replace")
    while isinstance(message, dict):
        message = next(
            (message[key] for key in ("error", "message", "detail") if message.get(key)), display_value(message)
        )
    return " ".join((message if isinstance(message, str) else display_value(message)).split())[:300] or "no message"
