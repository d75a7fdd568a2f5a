"""A small HTTP service on this machine: the common part of `skyrl serve-retriever` and `skyrl serve-reward`."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import ExitStack, suppress

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from skyrl.errors import ProcessError, Stopped, UserError
from skyrl.processes.addresses import is_loopback

LONGEST_BODY = 4 << 20
"""Maximum size of a request's body, in bytes."""

BODY_SECONDS = 60.0
"""Seconds in which the body of a request must arrive after its headers."""


HEADER_SECONDS = 20.0
"""Seconds in which the head of a request must arrive after the connection or the end of the previous request."""

KEPT_SECONDS = 15
"""Seconds for which an idle connection is kept: longer than the 5 s of httpx, so that a client never sends a request on
a connection that is being closed."""

MOST_CONNECTIONS = 1024
"""Maximum number of connections and requests at once; a request beyond it gets 503, after which clients try again."""


class _TimedProtocol(H11Protocol):
    """HTTP protocol of uvicorn with a deadline for a request's head. Without it, uvicorn waits forever for a client
    that sends half of one.
    """

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._wait_for_a_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._limit is not None and self.cycle is not None and not self.cycle.response_complete:
            self._limit.cancel()
            self._limit = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._limit is None:
            self._wait_for_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._limit is not None:
            self._limit.cancel()

    def _wait_for_a_head(self) -> None:
        self._limit = self.loop.call_later(HEADER_SECONDS, self.transport.close)


def listen(host: str, port: int, token: str | None, variable: str) -> socket.socket:
    """A socket that listens on host and port; port 0 is any free one. `variable` names the variable with the token.

    Raises `UserError` for an address that other machines can reach without a token, `ProcessError` for one that cannot
    be used.
    """
    if not token and not is_loopback(host):
        raise UserError(
            f"{host} can be reached from other machines: set {variable} to a secret here and where the run is "
            "started, or use --host 127.0.0.1"
        )
    with ExitStack() as undo:
        try:
            (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            bound = undo.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(1024)  # early requests wait until the index is loaded
        except OSError as error:
            raise ProcessError(f"cannot listen on {host}:{port}: {error.strerror}; see --host and --port") from error
        undo.pop_all()
    return bound


def serve(app: Starlette, bound: socket.socket) -> None:
    """Serve the app until SIGINT or SIGTERM, which ends the service without an error."""
    with suppress(KeyboardInterrupt, Stopped):  # raised for the signal after the server has shut down
        server_of(app).run(sockets=[bound])


def server_of(app: Starlette) -> uvicorn.Server:
    """A server that slow clients cannot block: heads and bodies have deadlines, and connections are limited."""
    config = uvicorn.Config(
        app,
        http=_TimedProtocol,
        limit_concurrency=MOST_CONNECTIONS,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEPT_SECONDS,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


async def body_of(request: Request) -> bytes:
    """Body of a request. Raises `ValueError` if it is too large, does not come in time, or its sender hung up."""
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > LONGEST_BODY:
                    raise ValueError(f"the body is longer than {LONGEST_BODY} bytes")
    except ClientDisconnect:
        raise ValueError("the sender hung up before the end of the body") from None
    except TimeoutError:
        raise ValueError(f"the body did not come within {BODY_SECONDS:g} s") from None
    return body


def has_token(token: str | None, request: Request) -> bool:
    """Whether the request has the token, if one is required."""
    if not token:
        return True
    return secrets.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode())
