"""The two ways to an MCP server: a sandboxed program's standard streams, and streamable HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter

from skyrl.sandbox.sandbox import ConfinedProcess

logging.getLogger("mcp").setLevel(logging.CRITICAL)  # the outcome of a call says what went wrong, once
logging.getLogger("httpx2").setLevel(logging.WARNING)  # an address may hold a key

SHOWN_ERRORS = 500
"""Largest number of characters of a program's last line of errors that are shown."""

_GRACE = 0.5
_TRANSPORT_ERRORS = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


@asynccontextmanager
async def over_standard_streams(
    start: Callable[[tuple[int, int, int]], ConfinedProcess], most: int, ended: Callable[[str], None]
) -> AsyncGenerator[
    tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
]:
    """The streams of messages from and to a program, which ends with the block. `start` starts it, given descriptors of
    its standard input, output and errors. A program that sends more than `most` bytes after a message to it is ended.
    `ended` is told how it ended, before the stream does. Lines of its output that are no messages are ignored. Raises
    `ProcessError`.
    """
    (parent_socket, child_socket), (errors, child_errors) = socket.socketpair(), socket.socketpair()
    with parent_socket, errors:
        with child_socket, child_errors:
            process = start((child_socket.fileno(), child_socket.fileno(), child_errors.fileno()))
        try:
            reader, writer = await asyncio.open_connection(sock=parent_socket, limit=most)
            error_reader, error_writer = await asyncio.open_connection(sock=errors)
            to_session, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            write_stream, from_session = anyio.create_memory_object_stream[SessionMessage](0)
            received, error_output = 0, bytearray()

            async def read_messages() -> None:
                nonlocal received
                with suppress(*_TRANSPORT_ERRORS):
                    async with to_session:
                        while line := await _next_line(reader):
                            received += len(line) if line.endswith(b"\n") else most + 1
                            message = _message_in(line) if received <= most else None
                            if message is not None:
                                await to_session.send(SessionMessage(message))
                            elif received > most:
                                break
                        ending = await _close_in_thread(process, _GRACE)
                        last = error_output.decode(errors="replace").strip().rpartition("\n")[2][-SHOWN_ERRORS:]
                        flooded = f"it sent more than {most} bytes at once" if received > most else ""
                        ended(flooded or ": ".join(filter(None, (ending, last))) or "it closed its output")

            async def write_messages() -> None:
                nonlocal received
                with suppress(*_TRANSPORT_ERRORS):
                    async with from_session:
                        async for message in from_session:
                            received = 0
                            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                            writer.write(text.encode() + b"\n")
                            await writer.drain()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_keep_end, error_reader, error_output)
                tasks.start_soon(read_messages)
                tasks.start_soon(write_messages)
                try:
                    yield read_stream, write_stream
                finally:
                    await _close_in_thread(process)
                    for stream in (writer, error_writer):
                        stream.close()
                    tasks.cancel_scope.cancel()
        finally:
            await _close_in_thread(process)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line; one that is longer than the reader's limit without its end, and empty at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError:
        return b"..."
    except (asyncio.IncompleteReadError, OSError):
        return b""


async def _keep_end(reader: asyncio.StreamReader, kept: bytearray) -> None:
    """Read until the end, and keep the last characters."""
    with suppress(OSError):
        while piece := await reader.read(1 << 16):
            kept[:] = (kept + piece)[-4 * SHOWN_ERRORS :]


async def _close_in_thread(process: ConfinedProcess, patience: float = 0.001) -> str:
    """Close the process in a thread, and wait for it although this task is cancelled."""
    return await asyncio.shield(asyncio.to_thread(process.close, patience))


def _message_in(line: bytes) -> JSONRPCMessage | None:
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None


@asynccontextmanager
async def over_http(
    url: str, headers: Mapping[str, str], most: int, seconds: float
) -> AsyncGenerator[tuple[object, object]]:
    """The streams of messages from and to a server at an address. An answer of more than `most` bytes is an error;
    `seconds` is how long it may take to connect.
    """

    async def bound(response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream), "the client is asynchronous"
        response.stream = _Bounded(response.stream, most)

    timeout = httpx2.Timeout(seconds, read=None)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [bound]}) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=most) as streams,
    ):
        yield streams


class _Bounded(httpx2.AsyncByteStream):
    """The body of a response, at most `most` bytes of it."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream, self._most = stream, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._most
        async for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise httpx2.StreamError(f"the answer has more than {self._most} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
