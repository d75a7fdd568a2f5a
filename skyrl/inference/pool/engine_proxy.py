"""An engine in another process, used through a handle like any other engine.

A callback cannot reach another process: the engine's process keeps the tokens that are drawn in a `TokenReport`, and
the caller fetches them while it waits for the answer.

    open_report --> draw_and_report, beside it: new_tokens, new_tokens, ... None
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress

from attrs import evolve

from skyrl.errors import ProcessLost, WeightSyncError
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, InFlight, NewTokens
from skyrl.processes.handles import Handle
from skyrl.weight_receiver.incoming_weights import Adapter, IncomingWeights


class TokenReport:
    """Tokens of one request that were drawn and not fetched yet. Used on one event loop; any thread may call `add`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._drawn: asyncio.Queue[NewTokens | None] = asyncio.Queue()
        """Tokens that were not fetched; None behind the last ones."""
        self._ended = False

    def add(self, new: NewTokens) -> None:
        """Report tokens, from any thread."""
        with suppress(RuntimeError):  # the loop has ended before the engine noticed
            self._loop.call_soon_threadsafe(self._drawn.put_nowait, new)

    def end(self) -> None:
        """Mark the report as complete: no more tokens follow."""
        self._loop.call_soon_threadsafe(self._drawn.put_nowait, None)  # after the tokens that were already reported

    async def fetch(self) -> list[NewTokens] | None:
        """Tokens since the last call, once there are any; None at the end."""
        new: list[NewTokens] = []
        while not self._ended and not (new and self._drawn.empty()):
            tokens = await self._drawn.get()
            self._ended = tokens is None
            new += [] if tokens is None else [tokens]
        return new or None


_REPORTS: dict[str, TokenReport] = {}
"""Open reports of this process, by name."""


async def open_report(engine: InferenceEngine, name: str) -> None:
    """Open the report of a request that is about to be drawn. `name` is unique."""
    _REPORTS[name] = TokenReport()


async def draw_and_report(engine: InferenceEngine, request: GenerationRequest, name: str) -> tuple[Completion, ...]:
    """Draw the samples of a request and report their tokens; the report ends with the call."""
    report = _REPORTS[name]
    try:
        return await engine.generate(evolve(request, on_tokens=report.add))
    except asyncio.CancelledError:
        _REPORTS.pop(name, None)  # the rest is not fetched any more
        raise
    finally:
        report.end()


async def new_tokens(engine: InferenceEngine, name: str) -> list[NewTokens] | None:
    """Tokens since the last call, once there are any; None when all were returned, which closes the report."""
    report = _REPORTS.get(name)
    tokens = None if report is None else await report.fetch()
    if tokens is None:
        _REPORTS.pop(name, None)
    return tokens


class EngineProxy:
    """An `InferenceEngine` over a handle. Every method raises `ProcessError` if the process is gone."""

    def __init__(self, handle: Handle[InferenceEngine]) -> None:
        self._handle = handle
        self.weight_version = 0
        """The version of the weights that was last adopted through this object; 0 until then."""

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order. A callback cannot reach another process: tokens are fetched for it."""
        if request.draw_elsewhere is not None:
            request = evolve(request, draw_elsewhere=None)
        if request.on_tokens is None:
            return await self._handle.call(InferenceEngine.generate, request)
        name = secrets.token_hex(16)
        await self._handle.call(open_report, name)
        call = self._handle.call(draw_and_report, evolve(request, on_tokens=None), name)
        drawing, hearing = asyncio.ensure_future(call), asyncio.ensure_future(self._hear(name, request.on_tokens))
        try:
            await asyncio.wait((drawing, hearing))
            return drawing.result()  # raises if the process is gone
        finally:
            for task in (drawing, hearing):
                task.cancel()
            await asyncio.gather(drawing, hearing, return_exceptions=True)

    async def _hear(self, name: str, on_tokens: Callable[[NewTokens], None]) -> None:
        """Pass on the tokens of a report until it is closed."""
        while (tokens := await self._handle.call(new_tokens, name)) is not None:
            for new in tokens:
                on_tokens(new)

    async def pause(self, in_flight: InFlight = "finish") -> None:
        await self._handle.call(InferenceEngine.pause, in_flight)

    async def resume(self) -> None:
        await self._handle.call(InferenceEngine.resume)

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        try:
            is_verified = await self._handle.call(InferenceEngine.load_weights, incoming, version)
        except ProcessLost as error:
            if error.process == self._handle.name:
                raise
            raise WeightSyncError(f"{self._handle.name} got no weights: {error}") from error  # another member ended
        self.weight_version = version
        return is_verified

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        await self._handle.call(InferenceEngine.add_adapter, name, adapter)

    async def remove_adapter(self, name: str) -> None:
        await self._handle.call(InferenceEngine.remove_adapter, name)

    async def current_load(self) -> EngineLoad | None:
        return await self._handle.call(InferenceEngine.current_load)

    async def sleep(self) -> bool:
        return await self._handle.call(InferenceEngine.sleep)

    async def wake(self) -> None:
        await self._handle.call(InferenceEngine.wake)

    async def close(self) -> None:
        await self._handle.call(InferenceEngine.close)
