"""How long the parts of a step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Clock:
    """Seconds by name, summed until they are taken."""

    def __init__(self, around: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Every measured block is in `around(name)`, too."""
        self._around = around
        self._seconds: dict[str, float] = {}
        self.total = 0.0
        """Seconds of all steps of the run, those before it was resumed among them."""

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
        """`timing/<name>` -> seconds since the last time this was asked, and start again at zero."""
        taken = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
