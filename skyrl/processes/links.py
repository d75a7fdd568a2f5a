"""Latency and bandwidth of a TCP connection between two machines: one listens and echoes, the other measures.

What is sent says nothing, and a listener ends by itself: no secret is needed to talk to it.
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
"""Seconds after which a listener ends, if nobody closes it."""


@frozen(kw_only=True)
class Link:
    """What one machine measured of its way to another one."""

    latency: float | None = None
    """Seconds there and back, the shortest of several; None where there is no way."""

    bandwidth: float | None = None
    """Bytes per second of one connection."""

    problem: str = ""
    """Why there is no way."""


class Echo:
    """Answers `measure` at a free port of this address until it is closed."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=64)
        self._listener.settimeout(_LASTS)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="skyrl-echo", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed, or nobody came
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_answer, args=(connection,), name="skyrl-echo", daemon=True).start()


def measure(address: str, port: int, *, patience: float = 5.0, seconds: float = 0.3) -> Link:
    """Measure the way to an `Echo`. No answer within `patience` seconds is a problem; `seconds` are spent on sending as
    much as gets through.
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
    """Bytes per second, until the other side has received the last one."""
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
        while (asked := connection.recv(1)) == b"p":
            connection.sendall(b"p")
        while asked and connection.recv(_CHUNK):
            pass
        connection.sendall(b"s")
