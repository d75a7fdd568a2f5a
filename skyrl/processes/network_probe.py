"""Latency and bandwidth of a TCP connection between two machines: one listens and echoes, the other measures.

The data sent has no meaning, and a listener ends by itself, so that no secret is needed to connect to it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from attrs import frozen

_PINGS = 20
_CHUNK = 1 << 18
_LASTS = 600.0
"""Seconds without a connection after which a listener ends, if it is not closed."""


@frozen(kw_only=True)
class Link:
    """Measurements of the connection from one machine to another."""

    latency: float | None = None
    """Round-trip time in seconds, the shortest of several; None if no connection can be made."""

    bandwidth: float | None = None
    """Bytes per second of one connection."""

    problem: str = ""
    """Reason why no connection can be made."""


class Echo:
    """Answers `measure` at a free port of this address until it is closed."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=64)
        self._listener.settimeout(_LASTS)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="skyrl-echo", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed, or no connection in time
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_answer, args=(connection,), name="skyrl-echo", daemon=True).start()


def measure(address: str, port: int, *, patience: float = 5.0, seconds: float = 0.3) -> Link:
    """Measure the connection to an `Echo`. No answer within `patience` seconds is a problem; bandwidth is measured for
    `seconds`.
    """
    try:
        with socket.create_connection((address, port), patience) as connection:
            connection.settimeout(max(patience, 10 * seconds))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency = min(_ping(connection) for _ in range(_PINGS))
            return Link(latency=latency, bandwidth=_stream(connection, seconds))
    except OSError as error:
        return Link(problem=str(error))


def _ping(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(b"p")
    if not connection.recv(1):
        raise OSError("the connection was closed from the other side")
    return time.perf_counter() - began


def _stream(connection: socket.socket, seconds: float) -> float:
    """Bytes per second, measured until the other side has received the last byte."""
    chunk, sent, began = bytes(_CHUNK), 0, time.perf_counter()
    connection.sendall(b"s")
    while time.perf_counter() < began + seconds:
        connection.sendall(chunk)
        sent += len(chunk)
    connection.shutdown(socket.SHUT_WR)
    if not connection.recv(1):
        raise OSError("the connection was closed from the other side")
    return sent / (time.perf_counter() - began)


def _answer(connection: socket.socket) -> None:
    """Echo single bytes, then swallow a stream and confirm it."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_LASTS)
        while (request := connection.recv(1)) == b"p":
            connection.sendall(b"p")
        while request and connection.recv(_CHUNK):
            pass
        connection.sendall(b"s")
