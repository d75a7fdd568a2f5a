"""Handles of objects that may live in another process, and groups of handles for the ranks of one role.

>>> import asyncio
>>> from fractions import Fraction
>>> from functools import partial
>>> from skyrl.processes.in_process import InProcess
>>> ranks = InProcess().start("number", [partial(Fraction, 7, 5)])
>>> asyncio.run(ranks.call(Fraction.limit_denominator, max_denominator=2))
[Fraction(3, 2)]

A method is called by passing the method itself, so that type checkers check its arguments and result like those of any
call. It has to be importable, since only its name is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from attrs import frozen

from skyrl.errors import ProcessError
from skyrl.planning.layout import Layout
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.processes.progress import Progress

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
A = TypeVar("A")
P = ParamSpec("P")


@frozen(kw_only=True)
class Deadlines:
    """Time limits, in seconds, after which the run ends with a message."""

    start: float = 600.0
    """Seconds until every process has started and built its object, with models loaded."""

    room: float = 0.0
    """Seconds to wait until a cluster has room for every process; 0: it must have room at once."""

    call: float = 3600.0
    """Seconds of one call, unless the caller names another deadline."""

    heartbeat: float = 60.0
    """Seconds without a heartbeat after which a process counts as lost. A process that computes still sends heartbeats;
    a stopped or hung one does not."""


class Handle(Protocol[T_co]):
    """Handle of one object, in this process or another."""

    @property
    def name(self) -> str:
        """Role and rank, such as `policy-1`."""

    def with_deadline(self, seconds: float) -> Self:
        """A handle of the same object whose calls have this deadline."""

    @overload
    async def call(
        self, method: Callable[Concatenate[T_co, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        """The result of `method(object, *args, **kwargs)`, awaited if it is a coroutine. A method of a class or
        Protocol stands for the object's own implementation of it. Raises TypeError for a method that cannot be imported
        by its name.

        A `SkyRLError` is raised unchanged. Raises `ProcessError` if the process died, sent no heartbeat or missed the
        deadline; its message names the process and its log file.
        """


class Group(Generic[T_co]):
    """The ranks of one role, in order. They compute together: if one fails, the others are not awaited."""

    def __init__(self, handles: Sequence[Handle[T_co]]) -> None:
        assert handles, "a group has at least one member"
        self.handles = tuple(handles)

    def __len__(self) -> int:
        return len(self.handles)

    @overload
    def call(
        self, method: Callable[Concatenate[T_co, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, list[R]]: ...
    @overload
    def call(
        self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, list[R]]: ...
    def call(
        self, method: Callable[..., object], *args: object, **kwargs: object
    ) -> Coroutine[Any, Any, Sequence[object]]:
        """Call every rank at once; results in order of ranks. Raises the error of the first rank that fails."""
        return gather_or_cancel([handle.call(method, *args, **kwargs) for handle in self.handles])

    @overload
    def deal(
        self,
        method: Callable[Concatenate[T_co, A, P], Awaitable[R]],
        shares: Sequence[A],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, list[R]]: ...
    @overload
    def deal(
        self, method: Callable[Concatenate[T_co, A, P], R], shares: Sequence[A], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, list[R]]: ...
    def deal(
        self, method: Callable[..., object], shares: Sequence[object], *args: object, **kwargs: object
    ) -> Coroutine[Any, Any, Sequence[object]]:
        """Call every rank at once, as `call` does, with `shares[i]` as the first argument of rank i."""
        assert len(shares) == len(self), f"{len(shares)} shares for {len(self)} ranks"
        return gather_or_cancel(
            [handle.call(method, share, *args, **kwargs) for handle, share in zip(self.handles, shares, strict=True)]
        )


class ExitNotice:
    """Records whether a process has ended early, when that was noticed, and why. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[object, Callable[[], None]] = {}
        self.error: ProcessError | None = None
        self.noticed = float("inf")

    def set(self, error: ProcessError) -> None:
        """Notify every listener; only the first cause counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error, self.noticed = error, time.monotonic()
            listeners = list(self._listeners.values())
        for tell in listeners:
            tell()

    def listen(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Call `tell` when the process ends, or at once if it has ended; returns a function that stops listening."""
        key = object()
        with self._lock:
            self._listeners[key] = tell
            is_set = self.error is not None
        if is_set:
            tell()

        def forget() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return forget


class Processes(Protocol):
    """Starts processes, watches them, and leaves none behind."""

    step: int
    """The current step of the run, shown on the lines of the processes' logs."""

    progress: Progress
    """Record of the calls that the run waits for. Set it before the first start."""

    exit_notice: ExitNotice
    """Notice of the end of what all processes need: those of Ray itself."""

    @property
    def host(self) -> str:
        """Address at which every process can reach this machine."""

    def restart(self, role: str, rank: int, maker: Callable[[], T]) -> Handle[T]:
        """Start a replacement for the process with this role and rank, which is ended if it still runs. It is on
        another machine if that of the process is gone. Returns when its object is made; raises `ProcessError` as
        `start` does.
        """

    def add(self, seat: Layout, maker: Callable[[], T]) -> Handle[T]:
        """Start one more process, in a new pool that is reserved for it. Returns when its object is made; raises
        `ProcessError` as `start` does.
        """

    def remove(self, role: str, rank: int) -> None:
        """End one process that has a pool to itself, and release the pool."""

    def prepare(self, role: str, makers: Sequence[Callable[[], object]]) -> None:
        """Start the processes of a role before their turn: they import what their makers need while others start. A
        maker of `functools.partial` whose function has an attribute `prepare` gets it called with the same arguments.
        `start` waits for them, and reports what went wrong.
        """

    def start(self, role: str, makers: Sequence[Callable[[], T]]) -> Group[T]:
        """Start one process for each maker; `makers[i]()` makes the object of rank i inside its process. Returns when
        all are made.

        Makers are pickled: use `functools.partial` over importable callables. Raises the error of a maker, or
        `ProcessError`, which says what is missing, if the cluster has no room or the deadline passes.
        """

    def dump_stacks(self) -> list[Path]:
        """Write the stacks of all threads of every process into its log; returns the logs' paths. Thread-safe."""

    def close(self) -> None:
        """Ends every process; returns when they are gone. Safe to call twice."""
