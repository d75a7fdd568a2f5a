"""Engines that died, started again: a bounded number of times, after pauses that grow. See `InferenceEngineClient`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from skyrl.errors import RunError
from skyrl.inference.engine import InferenceEngine

_log = logging.getLogger(__name__)


class EngineRestarts:
    """Starts engines again in the background; they wait here until they are taken into service."""

    def __init__(
        self,
        start: Callable[[int], Awaitable[InferenceEngine]],
        *,
        most: int,
        backoff: float,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> None:
        """`start` makes the engine of a number anew, with the weights that a run starts from, or raises `RunError`.

        Each engine is started at most `most` times in a run, the first time after `backoff` seconds, then after twice
        as many each time.
        """
        self._start, self._most, self._backoff, self._sleep = start, most, backoff, sleep or asyncio.sleep
        self._tries: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[tuple[int, InferenceEngine]] = []
        self.succeeded = 0
        """Restarts so far that gave an engine."""

    def died(self, number: int) -> None:
        """Starts the engine of this number again, if that may still be tried."""
        task = asyncio.get_running_loop().create_task(self.again(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def again(self, number: int) -> None:
        """Start the engine of this number until it is there, or has been started too often."""
        while self._tries[number] < self._most:
            self._tries[number] += 1
            await self._sleep(self._backoff * 2 ** (self._tries[number] - 1))
            try:
                engine = await self._start(number)
            except RunError as error:
                _log.warning("inference engine %d could not be started again: %s", number, error)
                continue
            self.succeeded += 1
            self._ready.append((number, engine))
            _log.warning("inference engine %d is there again, and serves with the next weights", number)
            return
        _log.warning("inference engine %d stays out of service after %d restarts", number, self._most)

    def take(self) -> list[tuple[int, InferenceEngine]]:
        """Number and engine of each that is ready; they are the caller's from now on."""
        taken, self._ready = self._ready, []
        return taken

    async def close(self) -> None:
        """Gives up what is being started, and closes what nobody took."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(engine.close() for _, engine in self.take()), return_exceptions=True)
