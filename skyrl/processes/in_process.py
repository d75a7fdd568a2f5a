"""Processes inside the command's own: a handle is the object itself."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar, overload

from skyrl.planning.layout import Layout
from skyrl.processes.calls import apply, name_of
from skyrl.processes.handles import Group
from skyrl.processes.progress import Progress

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class LocalHandle(Generic[T]):
    """An object of this process. Deadlines have no effect here: the watcher would be the process that computes."""

    def __init__(self, name: str, target: T, progress: Progress | None = None) -> None:
        self.name, self.target = name, target
        self._progress = progress or Progress()

    def within(self, seconds: float) -> LocalHandle[T]:
        return self

    @overload
    async def call(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        name = name_of(method)  # what only works in this process is refused in every one
        with self._progress.waiting_for(f"{self.name} in {name[1]}"):
            result = apply(self.target, method, args, kwargs)
            return await result if inspect.isawaitable(result) else result


class InProcess:
    """`Processes` without a process: one rank of each role."""

    step = 0
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.progress = Progress()

    def start(self, role: str, makers: Sequence[Callable[[], T]]) -> Group[T]:
        (maker,) = makers  # check() refuses more ranks than one here
        with self.progress.waiting_for(f"the start of {role}-0"):
            return Group([LocalHandle(f"{role}-0", maker(), self.progress)])

    def restart(self, role: str, rank: int, maker: Callable[[], T]) -> LocalHandle[T]:
        """Another object in the place of the old one."""
        return LocalHandle(f"{role}-{rank}", maker(), self.progress)

    def add(self, seat: Layout, maker: Callable[[], T]) -> LocalHandle[T]:
        """One object more."""
        [placed] = seat.placements
        return LocalHandle(f"{placed.role}-{placed.rank}", maker(), self.progress)

    def remove(self, role: str, rank: int) -> None:
        """Does nothing: there is no process to end."""

    def dump_stacks(self) -> list[Path]:
        """There is no other process."""
        return []

    def close(self) -> None:
        """Does nothing: no process was started."""
