"""The server of each HTTP service of this package: its socket, its token, and limits on connections.

`service_app.py` makes the applications.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from skyrl.errors import ProcessError, Stopped, UserError
from skyrl.processes.addresses import is_loopback

HEADER_SECONDS = 20.0
"""Seconds in which the head of a request must arrive after the connection or the end of the previous request."""

KEPT_SECONDS = 15
"""Seconds for which an idle connection is kept: longer than the 5 s of httpx, so that a client never sends a request on
a connection that is being closed."""

WAITING = 1024
"""Maximum number of connections that wait to be accepted."""

MOST_CONNECTIONS = 1024
"""Maximum number of connections and requests at once, if the process may open twice as many files; a request beyond it
gets 503, after which clients try again."""

MOST_FILES = 1 << 16
"""Number of open files that the process permits itself, up to the limit that it was started with."""

SHORTEST_TOKEN = 16
"""Smallest number of characters of a token."""

_BEGINNINGS = itertools.count()


class _BoundedProtocol(H11Protocol):
    """HTTP protocol of uvicorn with a deadline for a request's head, and a bound on connections. Without them, uvicorn
    waits forever for a client that sends half of one, and accepts idle connections until the process has no file left.
    """

    _limit: asyncio.TimerHandle | None = None
    _waits_since = 0
    """Position among all beginnings of a wait for a head: several lie in one millisecond, the resolution of uvloop's
    clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._wait_for_a_head()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room(self.limit_concurrency)

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
        self._waits_since = next(_BEGINNINGS)

    def _make_room(self, limit: int) -> None:
        """Close the connections that have waited longest for a request. If all others are answered, this one stays, to
        be told so with 503, up to an eighth beyond the limit.
        """
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, _BoundedProtocol) and connection._limit and connection is not self
        ]
        surplus = len(self.connections) - limit + 1
        closing = heapq.nsmallest(surplus, waiting, key=lambda connection: connection._waits_since)
        if len(self.connections) - len(closing) > limit + limit // 8:
            closing.append(self)
        for connection in closing:
            connection.connections.discard(connection)
            connection.transport.abort()


class _Server(uvicorn.Server):
    """A server whose listening socket holds connections that it does not accept yet."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for item in sockets or ():
            item.listen(WAITING)  # asyncio had made it as short as the number that it accepts at a time


def listen(host: str, port: int, token: str | None, variable: str) -> socket.socket:
    """A socket that listens on host and port; port 0 is any free one. `variable` names the variable with the token.

    Raises `ProcessError` for an address that cannot be used, and `UserError` for one that other machines can reach
    without a token, or with one that is no secret or that no request can carry.
    """
    _resolved(host, port)
    remedy = f'export {variable}="$(openssl rand -hex 32)" here and where the run is started'
    if not token and not is_loopback(host):
        raise UserError(f"{host} can be reached from other machines: {remedy}, or use --host 127.0.0.1")
    printable = all(" " <= letter <= "~" for letter in token or "") and token == (token or "").strip()
    if token and not (printable and len(token) >= SHORTEST_TOKEN):
        raise UserError(
            f"{variable} is no usable token: it needs at least {SHORTEST_TOKEN} printable characters of ASCII, without "
            f"space around them, as a header carries it: {remedy}"
        )
    return bound_socket(host, port)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on host and port; port 0 is any free one. Raises `ProcessError` for an address that cannot
    be used.
    """
    family, kind, protocol, address = _resolved(host, port)
    with ExitStack() as undo, _refused_address(host, port):
        # Without the protocol's number, asyncio does not set TCP_NODELAY, and each answer waits 40 ms for an ACK.
        bound = undo.enter_context(socket.socket(family, kind, protocol))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(WAITING)  # early requests wait until the index is loaded
        undo.pop_all()
    return bound


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, int, tuple[Any, ...]]:
    with _refused_address(host, port):
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return family, kind, protocol, address


@contextmanager
def _refused_address(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProcessError(f"cannot listen on {host}:{port}: {reason}; see --host and --port") from error


def serve(app: Starlette, bound: socket.socket) -> None:
    """Serve the app until SIGINT or SIGTERM, which ends the service without an error."""
    with suppress(KeyboardInterrupt, Stopped):  # raised for the signal after the server has shut down
        server_of(app).run(sockets=[bound])


def server_of(app: Starlette) -> uvicorn.Server:
    """A server that slow and idle clients cannot block: heads and bodies have deadlines, and connections take at most
    half of the files that the process may open, so that whatever runs beside it keeps the rest.
    """
    most = min(MOST_CONNECTIONS, _permitted_files() // 2)
    config = uvicorn.Config(
        app,
        http=_BoundedProtocol,
        ws="none",
        limit_concurrency=most,
        backlog=max(1, most // 8),  # the number of connections that asyncio accepts before it serves one
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEPT_SECONDS,
        timeout_graceful_shutdown=5,
    )
    return _Server(config)


def _permitted_files() -> int:
    """Number of files that the process may open, raised up to `MOST_FILES` if it was started with a lower one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
