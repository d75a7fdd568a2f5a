"""An event loop on which waiting takes no time: the clock jumps to the next event that is due.

It runs unmodified asyncio code, including schedulers and deadlines, that waits only for time and for other coroutines:
no threads, no sockets. A deadlock is detected immediately.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl.errors import RunError

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

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


class _Clock(selectors.BaseSelector):
    """A selector that advances the clock instead of waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RunError("deadlock: all tasks are waiting, and no event is scheduled")
        self.now += max(timeout, 0.0)
        return self._real.select(0)

    def register(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
