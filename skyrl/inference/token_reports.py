"""Reports the tokens of an engine in another process as they are drawn: the caller fetches them while it waits for the
answer.

    open_report --> draw_and_report, beside it: new_tokens, new_tokens, ... None

`RemoteEngine` calls these functions on the engine, in the engine's process.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from attrs import evolve

from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, NewTokens


class TokenReport:
    """Tokens of one request that were drawn and not fetched yet. Used on one event loop; any thread may call `add`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._new: list[NewTokens] = []
        self._changed, self._ended = asyncio.Event(), False

    def add(self, new: NewTokens) -> None:
        """Report tokens, from any thread."""
        with suppress(RuntimeError):  # the loop has ended before the engine noticed
            self._loop.call_soon_threadsafe(self._append, new)

    def end(self) -> None:
        """Mark the report as complete: no more tokens follow."""
        self._loop.call_soon_threadsafe(self._end)  # after the tokens that were already reported

    async def fetch(self) -> list[NewTokens] | None:
        """Tokens since the last call, once there are any; None at the end."""
        while not (self._new or self._ended):
            self._changed.clear()
            await self._changed.wait()
        new, self._new = self._new, []
        return new or None

    def _append(self, new: NewTokens) -> None:
        self._new.append(new)
        self._changed.set()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()


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
    found = None if report is None else await report.fetch()
    if found is None:
        _REPORTS.pop(name, None)
    return found
