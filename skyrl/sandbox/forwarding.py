"""Forwards connections out of a network namespace to one service.

    program --> 127.0.0.1:PORT in its namespace --> this process, which accepts them --> the service

The supervisor listens in the program's network namespace and passes the socket to this process: the program can reach
no other address, and no process of the run is in its namespace.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Thread

from skyrl.errors import ProcessError

MOST_CONNECTIONS = 64
"""Most simultaneous connections of one program; further ones are closed."""

_PIECE = 1 << 16


@contextmanager
def forwarding(listener: socket.socket, service: tuple[str, int]) -> Iterator[None]:
    """Forward connections to `listener` to the service (host, port) while the block runs.

    Raises ProcessError if it cannot begin, as where the process has no descriptor left.
    """
    started: Future[Callable[[], object]] = Future()

    def forward() -> None:
        try:
            asyncio.run(_forward(listener, service, started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = Thread(target=forward, name="forwarding", daemon=True)
    thread.start()
    try:
        stop = started.result()
    except Exception as error:
        raise ProcessError(f"the network of a sandboxed process could not be forwarded: {error}") from error
    try:
        yield
    finally:
        stop()
        thread.join()


async def _forward(listener: socket.socket, service: tuple[str, int], started: Future[Callable[[], object]]) -> None:
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    connected = 0

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        try:
            if connected <= MOST_CONNECTIONS:
                with suppress(OSError):
                    service_reader, service_writer = await asyncio.open_connection(*service)
                    try:
                        await asyncio.gather(_copy_stream(reader, service_writer), _copy_stream(service_reader, writer))
                    finally:
                        service_writer.close()
        finally:
            connected -= 1
            writer.close()

    server = await asyncio.start_server(join, sock=listener)
    started.set_result(lambda: loop.call_soon_threadsafe(ending.set))
    await ending.wait()
    server.close()


async def _copy_stream(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy bytes until the source ends, then end the target."""
    with suppress(OSError):
        while piece := await source.read(_PIECE):
            target.write(piece)
            await target.drain()
    with suppress(OSError, RuntimeError):  # the target was closed first
        target.write_eof()
