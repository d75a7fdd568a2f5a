"""Connections to MCP servers, which open at the first call and again after the server was lost.

    McpServer(config, ...).offered()            the tools of a server, asked for once
    McpConnection(server).call(name, arguments) the text of a result, or `ToolFailed` with what the policy is told

All run on the event loop of `skyrl.envs.coroutines`. Whatever a server does, a call ends by its deadline. A server that
misses the deadline, dies or sends too much is ended: the next call opens a new connection.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attrs import frozen

from skyrl.config.settings.environment import McpServerConfig
from skyrl.envs.tools import ToolFailed
from skyrl.errors import TaskError, UserError
from skyrl.processes.credentials import api_key
from skyrl.sandbox.commands import LocatedCommand, located_command
from skyrl.sandbox.fork_client import Command
from skyrl.sandbox.sandbox import ConfinedProcess, ResourceLimits, shared_sandbox
from skyrl.sandbox.tiers import Tier
from skyrl.tree import Secret

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, ContentBlock, Tool

T = TypeVar("T")

MOST_BYTES = 4 << 20
"""Largest number of bytes that a server may send in answer to one message."""

MOST_PAGES = 100
"""Largest number of pages of a list of tools."""

SHOWN_REASON = 500
"""Largest number of characters of an error that are shown."""

_CLOSING_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_KEPT_VARIABLES = ("PATH", "LANG", "VIRTUAL_ENV", "PYTHONPATH")
_STARTS_ANEW = "the next call starts it anew, without what it kept"


class ServerLost(ToolFailed):
    """A call with which the connection to its server ended."""


@frozen(kw_only=True)
class McpServer:
    """A server of the configuration, and how long it may take."""

    config: McpServerConfig
    config_path: str
    """Path of its table in the configuration."""

    tier: Tier | Literal["auto"]
    start_seconds: float
    call_seconds: float

    async def offered(self) -> tuple[Tool, ...]:
        """Its tools. Raises `UserError`, in one sentence."""
        session = await self.opened()
        try:
            return await _run_with_deadline(self.start_seconds, session.tools())
        except TimeoutError:
            limit = f"{self.start_seconds:g} s (environment.skyrl_gym.mcp.start_timeout_seconds)"
            raise TaskError(f"the MCP server {self.config.shown} did not list its tools within {limit}") from None
        except Exception as error:
            reason = session.lost or _describe_error(error)
            raise TaskError(f"the MCP server {self.config.shown} does not list its tools: {reason}") from error
        finally:
            await session.close()

    async def opened(self) -> ServerSession:
        """A new connection. A server at an address is waited for. Raises `UserError`."""
        clock, pause = asyncio.get_running_loop().time, _FIRST_PAUSE
        deadline = clock() + self.start_seconds
        while True:
            session = ServerSession(self)
            reason = await session.open(max(0.0, deadline - clock()))
            if not reason:
                return session
            await session.close()
            if self.config.command or clock() + pause >= deadline:
                verb = "does not start" if self.config.command else "cannot be used"
                raise TaskError(f"the MCP server {self.config.shown} {verb} ({self.config_path}): {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @asynccontextmanager
    async def streams(self, ended: Callable[[str], None]) -> AsyncGenerator[Any]:
        """Streams of messages from and to the server; `ended` is told how its program ended."""
        from skyrl.envs.mcp.transports import over_http, over_standard_streams

        if self.config.command:
            async with over_standard_streams(self._start, MOST_BYTES, ended) as streams:
                yield streams
        else:
            async with over_http(str(self.config.url), self.headers(), MOST_BYTES, self.start_seconds) as streams:
                yield streams

    @cached_property
    def command(self) -> LocatedCommand:
        """Its command. Raises `TaskError` for files that do not exist."""
        return located_command(self.config.command, self.config.readable, self.config_path)

    def headers(self) -> dict[str, str]:
        """Headers of requests, with their secrets. Raises `TaskError` for one that is not there."""
        revealed = {name: self._revealed(name, secret) for name, secret in self.config.headers.items()}
        token = self.config.token
        bearer = {} if token is None else {"Authorization": f"Bearer {self._revealed('token', token)}"}
        return {**bearer, **revealed}

    def _revealed(self, name: str, secret: Secret) -> str:
        value = (api_key(secret.name) or "").strip()
        if not value:
            raise TaskError(f"the variable {secret.name} is not set, from which {self.config_path} takes its {name}")
        if not value.isascii() or not value.isprintable():  # a library's error would show the value
            raise TaskError(f"the variable {secret.name} holds characters that no header may have")
        return value

    def _start(self, streams: tuple[int, int, int]) -> ConfinedProcess:
        config, command = self.config, self.command
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        limits = ResourceLimits(
            cpu_seconds=24 * 3600,
            memory_bytes=int(config.memory_gb * 1e9),
            file_bytes=256 << 20,
            folder_bytes=512 << 20,
            open_files=512,
        )
        started = Command(arguments=command.arguments, environment={**kept, **config.env})
        return ConfinedProcess(shared_sandbox(self.tier, command.files), limits, streams, command=started)


class ServerSession:
    """One connection to a server."""

    lost = ""
    """Why the server is gone; empty while it is there."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self.calls = 0
        """Calls that run."""

    async def open(self, seconds: float) -> str:
        """Connect. Returns the reason why not. Raises `UserError` for what no further attempt can mend."""
        self._task = asyncio.create_task(self._serve())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._opened)
        except TimeoutError:
            return self.lost or f"it gave no answer within {self._server.start_seconds:g} s"
        except UserError:
            await self.close()
            raise
        except Exception as error:  # noqa: BLE001  # whatever the library raises for what the server answered
            return self.lost or _describe_error(error)
        return ""

    async def tools(self) -> tuple[Tool, ...]:
        """All tools of the server. Raises `MCPError` and whatever else its answer causes."""
        client, cursor = self._opened.result(), None
        tools: list[Tool] = []
        for _ in range(MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return tuple(tools)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool. Raises `TimeoutError` at the deadline, `MCPError` and whatever else its answer causes."""
        return await _run_with_deadline(
            self._server.call_seconds, self._opened.result().call_tool(name, dict(arguments))
        )

    async def close(self) -> None:
        """End the connection, and the server's program."""
        self._closing.set()
        if self._task is None:
            return
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=_CLOSING_SECONDS)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CLOSING_SECONDS)

    async def _serve(self) -> None:
        """Hold the connection open. Its libraries want it closed by the task that opened it."""
        from mcp import Client

        try:
            async with Client(self._server.streams(self._mark_lost), cache=None) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001  # goes to the caller of `open`, or ends with the connection
            self.lost = self.lost or _describe_error(error)
            if not self._opened.done():
                self._opened.set_exception(_leaf(error))
                self._opened.exception()  # is read by now, though `open` may have left

    def _mark_lost(self, reason: str) -> None:
        self.lost = reason


class McpConnection:
    """A connection that opens at the first call, and again when it was lost. Calls may overlap."""

    def __init__(self, server: McpServer) -> None:
        self._server, self._lock = server, asyncio.Lock()
        self._session: ServerSession | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result. Raises `ToolFailed`, `ServerLost` if the connection ends with the call, and
        `UserError` if the server cannot be opened.
        """
        session = await self._opened()
        session.calls += 1
        try:
            result = await session.call(name, arguments)
        except TimeoutError:
            session.lost = session.lost or "late"
            late = f"{name} gave nothing within {self._server.call_seconds:g} s and its server was ended"
            raise ServerLost(f"{late}; {_STARTS_ANEW}", counted="tool_timeouts") from None
        except Exception as error:
            if not session.lost and not _is_gone(error):
                raise ToolFailed(_describe_error(error)) from error
            session.lost = session.lost or _describe_error(error)
            raise ServerLost(f"the server of {name} was lost ({session.lost}); {_STARTS_ANEW}") from error
        finally:
            session.calls -= 1
            self._leave(session)
        text = text_of(result)
        if result.is_error:
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """End the connection."""
        if self._session is not None:
            await self._session.close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _opened(self) -> ServerSession:
        async with self._lock:
            if self._session is not None and self._session.lost:
                self._leave(self._session)
            if self._session is None:
                self._session = await self._server.opened()
            return self._session

    def _leave(self, session: ServerSession) -> None:
        """Open a new connection for the next call if this one was lost, and close it after its last call."""
        if not session.lost:
            return
        if self._session is session:
            self._session = None
        if not session.calls:
            task = asyncio.create_task(session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _run_with_deadline(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises `TimeoutError` at the deadline, without waiting for it to take its cancellation."""
    task = asyncio.create_task(work)
    # Its exception is read, though nobody may wait for it.
    task.add_done_callback(lambda future: future.cancelled() or future.exception())
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
        raise TimeoutError
    return task.result()


@cache
def shared_connection(server: McpServer) -> McpConnection:
    """The connection of all episodes of this process to a server."""
    return McpConnection(server)


def text_of(result: CallToolResult) -> str:
    """The text of a result, with a word in place of what is not text."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text_of_block, result.content))


def _text_of_block(block: ContentBlock) -> str:
    text = getattr(block, "text", None) or getattr(getattr(block, "resource", None), "text", None)
    return text if isinstance(text, str) else f"[{block.type}]" if block.type != "text" else ""


def _is_gone(error: Exception) -> bool:
    """Whether the error means that the connection is of no more use, rather than that the server refused the call."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED


def _leaf(error: BaseException) -> BaseException:
    """The first error in nested groups; for a cancelled task, an exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError("the connection was given up")


def _describe_error(error: BaseException) -> str:
    """An error in a few words, without line breaks."""
    leaf = _leaf(error)
    return " ".join(str(leaf).split())[:SHOWN_REASON] or type(leaf).__name__
