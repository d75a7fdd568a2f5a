"""Durations of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Clock:
    """Seconds by name, summed until they are taken."""

    def __init__(self, around: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Every measured block also runs inside `around(name)`."""
        self._around = around
        self._seconds: dict[str, float] = {}
        self.total = 0.0
        """Seconds of all steps of the run, including earlier sessions."""

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the wall-clock time of the block to `name`."""
        start = time.perf_counter()
        try:
            with self._around(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """`timing/<name>` -> seconds since the last call, and start again from zero."""
        timings = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return timings
