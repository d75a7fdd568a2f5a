"""A small HTTP service on this machine: what `skyrl serve-retriever` and `skyrl serve-reward` have in common."""

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
"""Bytes of a request."""

BODY_SECONDS = 60.0
"""Time for the body of a request to come, after its headers."""


HEADER_SECONDS = 20.0
"""Time for the head of a request to come, from the connection or the end of the request before it."""

KEPT_SECONDS = 15
"""Time that an idle connection is kept: longer than the 5 s of httpx, so that a client never sends a request on a
connection that is being closed."""

MOST_CONNECTIONS = 1024
"""Connections and requests at once; a request beyond them is answered with 503, which clients try again."""


class _TimedProtocol(H11Protocol):
    """HTTP of uvicorn, which by itself waits without end for a client that sends half of a request's head."""

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
    """A socket that listens there; port 0 is any that is free. `variable` is where a token is looked for.

    Raises `UserError` for an address that others can reach while there is no token, `ProcessError` for one that cannot
    be had.
    """
    if not token and not is_loopback(host):
        raise UserError(
            f"{host} can be reached from other machines: set {variable} to a secret here and where the run is "
            "started, or take --host 127.0.0.1"
        )
    with ExitStack() as undo:
        try:
            (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            bound = undo.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(1024)  # who asks before the index is there waits for it
        except OSError as error:
            raise ProcessError(f"cannot listen on {host}:{port}: {error.strerror}; see --host and --port") from error
        undo.pop_all()
    return bound


def serve(app: Starlette, bound: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM, which ends a service as it should end."""
    with suppress(KeyboardInterrupt, Stopped):  # what the signal means to the command, once the server is down
        server_of(app).run(sockets=[bound])


def server_of(app: Starlette) -> uvicorn.Server:
    """A server that no slow client can hold: heads and bodies have deadlines, and connections a number."""
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
    """Does it bring the token, where there is one?"""
    if not token:
        return True
    return secrets.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode())
