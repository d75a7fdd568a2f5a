"""Runs all objects in the command's own process: a handle calls its object directly."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar, overload

from skyrl.planning.layout import Layout
from skyrl.processes.calls import apply, name_of
from skyrl.processes.handles import ExitNotice, Group
from skyrl.processes.progress import Progress

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class LocalHandle(Generic[T]):
    """Handle of an object in this process. Deadlines have no effect: the process that computes cannot watch itself."""

    def __init__(
        self, name: str, target: T, progress: Progress | None = None, *, thread: Executor | None = None
    ) -> None:
        """`thread` runs the calls, which are no coroutines, so that the event loop goes on; None: it waits for them."""
        self.name, self.target, self._thread = name, target, thread
        self._progress = progress or Progress()

    def with_deadline(self, seconds: float) -> LocalHandle[T]:
        return self

    @overload
    async def call(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        name = name_of(method)  # refuse methods here that other processes could not import
        with self._progress.waiting_for(f"{self.name} in {name[1]}"):
            work = partial(apply, self.target, method, args, kwargs)
            if self._thread is not None:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
            result = work()
            return await result if inspect.isawaitable(result) else result


class InProcess:
    """Implementation of `Processes` without other processes, for one rank of each role."""

    step = 0
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.progress = Progress()
        self.exit_notice = ExitNotice()

    def prepare(self, role: str, makers: Sequence[Callable[[], object]]) -> None:
        """Does nothing: no process has to start."""

    def start(self, role: str, makers: Sequence[Callable[[], T]]) -> Group[T]:
        (maker,) = makers  # check() refuses more ranks than one here
        with self.progress.waiting_for(f"the start of {role}-0"):
            return Group([LocalHandle(f"{role}-0", maker(), self.progress)])

    def restart(self, role: str, rank: int, maker: Callable[[], T]) -> LocalHandle[T]:
        """Make another object, which replaces the old one."""
        return LocalHandle(f"{role}-{rank}", maker(), self.progress)

    def add(self, seat: Layout, maker: Callable[[], T]) -> LocalHandle[T]:
        """Make one more object."""
        [placed] = seat.placements
        return LocalHandle(f"{placed.role}-{placed.rank}", maker(), self.progress)

    def remove(self, role: str, rank: int) -> None:
        """Does nothing: there is no process to end."""

    def dump_stacks(self) -> list[Path]:
        """Returns no logs: there is no other process."""
        return []

    def close(self) -> None:
        """Does nothing: no process was started."""
