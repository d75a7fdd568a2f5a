"""An event loop on which waiting takes no time: the clock jumps to the next event that is due.

It runs unmodified asyncio code, including schedulers and deadlines, that waits only for time and for other coroutines:
no threads, no sockets. A deadlock is detected immediately.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from skyrl.errors import RunError

T = TypeVar("T")


def run_in_virtual_time(program: Coroutine[Any, Any, T]) -> T:
    """Run `program` on a loop whose `time()` begins at 0, in seconds; returns its result. Raises `RunError` for a
    deadlock.
    """
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(program)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Clock(selectors.DefaultSelector):
    """A selector that advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RunError("deadlock: all tasks are waiting, and no event is scheduled")
        self.now += max(timeout, 0.0)
        return super().select(0)
