"""Starts engines during a run: those that died, a bounded number of times with exponential backoff, and those that are
added. See `InferenceEngineClient`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine

from skyrl.errors import ProcessError, RunError
from skyrl.inference.engine import InferenceEngine

_log = logging.getLogger(__name__)


class EngineRestarts:
    """Starts engines in the background, which wait here until they are taken into service."""

    def __init__(
        self,
        start: Callable[[int], Awaitable[InferenceEngine]],
        *,
        most: int,
        backoff: float,
        sleep: Callable[[float], Awaitable[object]] | None = None,
        of_others: bool = False,
    ) -> None:
        """`start` starts the engine of a given number, with the weights that a run starts from, or raises `RunError`.

        Each engine is restarted at most `most` times in a run: after `backoff` seconds at first, then after twice as
        long each time. `of_others` means that the engines are servers that others operate: `start` waits for one to
        answer again. One with the wrong weights is not used again, and the run does not wait for the last one.
        """
        self._of_others = of_others
        self._start, self._most, self._backoff, self._sleep = start, most, backoff, sleep or asyncio.sleep
        self._tries: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[tuple[int, InferenceEngine]] = []
        self.starting: set[int] = set()
        """Numbers of engines that are being started."""
        self.ended = asyncio.Event()
        """Set when the start of an engine has ended, well or not."""
        self.succeeded = 0
        """Number of successful restarts so far."""
        self._not_started: list[tuple[int, str]] = []

    def died(self, number: int, cause: RunError) -> None:
        """Restart the engine of this number, if it has restarts left."""
        if self._of_others and not isinstance(cause, ProcessError):
            return
        self._start_in_background(number, self.restart(number))

    def may_replace(self, number: int) -> bool:
        """Whether an engine may come into service if this one dies: itself, or another that is being started."""
        return not self._of_others and bool(self._tries[number] < self._most or self._tasks or self._ready)

    async def wait_until_ready(self) -> bool:
        """Returns True once an engine can be taken, or False if none is being started any more."""
        while not self._ready:
            if not self._tasks:
                return False
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return True

    def add(self, number: int) -> None:
        """Start a new engine; a failed start is not repeated."""
        self._start_in_background(number, self._start_once(number))

    def _start_in_background(self, number: int, start: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(start)
        self._tasks.add(task)
        self.starting.add(number)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.starting.discard(number)
            self.ended.set()

        task.add_done_callback(ended)

    async def _start_once(self, number: int) -> None:
        try:
            engine = await self._start(number)
        except RunError as error:
            self._not_started.append((number, str(error)))
            _log.warning("inference engine %d could not be added: %s", number, error)
            return
        self._ready.append((number, engine))
        _log.warning("inference engine %d has started, and serves from the next weight transfer on", number)

    async def restart(self, number: int) -> None:
        """Start the engine of this number until that succeeds, or its restarts are used up."""
        while self._tries[number] < self._most:
            self._tries[number] += 1
            await self._sleep(self._backoff * 2 ** (self._tries[number] - 1))
            try:
                engine = await self._start(number)
            except RunError as error:
                _log.warning("inference engine %d could not be restarted: %s", number, error)
                continue
            self.succeeded += 1
            self._ready.append((number, engine))
            _log.warning("inference engine %d has restarted", number)
            return
        _log.warning("inference engine %d stays out of service after %d restarts", number, self._most)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Numbers of the engines that are ready and not taken yet."""
        return tuple(number for number, _ in self._ready)

    def take(self) -> list[tuple[int, InferenceEngine]]:
        """Number and engine of each one that is ready. The caller owns them from now on."""
        ready, self._ready = self._ready, []
        return ready

    def take_not_started(self) -> list[tuple[int, str]]:
        """Number and reason of each added engine that could not be started, since the last call."""
        not_started, self._not_started = self._not_started, []
        return not_started

    async def close(self) -> None:
        """Cancel starts in progress, and close engines that were not taken into service."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(engine.close() for _, engine in self.take()), return_exceptions=True)
