"""How a caller sees an object that may live in another process: a handle, and a group of handles for the ranks of one
role.

    policies = processes.start("policy", [partial(PolicyWorker, trainer, objective, ranks=ranks) for ranks in ...])
    await policies.call(PolicyWorker.metadata)

A method is called by handing over the method itself, so that its arguments and result are checked like those of any
call. It has to be importable, since only its name travels.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from attrs import frozen

from skyrl.planning.layout import Layout
from skyrl.processes.progress import Progress
from skyrl.processes.together import gather_or_cancel

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
A = TypeVar("A")
P = ParamSpec("P")


@frozen(kw_only=True)
class Deadlines:
    """How long anything may take before the run ends with a message, in seconds."""

    start: float = 600.0
    """Seconds until every process has started and built its object, models loaded."""

    room: float = 0.0
    """Seconds that a cluster may take to have room for every process; 0: it has to have it at once."""

    call: float = 3600.0
    """Seconds of one call, unless the caller names another deadline."""

    heartbeat: float = 60.0
    """Seconds without a heartbeat of a process. A process that computes still sends one; a stopped or hung one does
    not."""


class Handle(Protocol[T_co]):
    """One object, wherever it lives."""

    @property
    def name(self) -> str:
        """Role and rank, such as `policy-1`."""

    def within(self, seconds: float) -> Self:
        """A handle of the same object whose calls have this deadline."""

    @overload
    async def call(
        self, method: Callable[Concatenate[T_co, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        """What `method(object, *args, **kwargs)` returns, awaited where it is a coroutine. A method of a class or
        Protocol means the object's own version of it. Raises TypeError for what cannot be imported by its name.

        An exception of ours (`SkyRLError`) is raised as it was. Raises `ProcessError` when the process died, gave no
        sign of life or missed the deadline; its message names the process and the place of its log.
        """


class Group(Generic[T_co]):
    """The ranks of one role, in order. They compute together: when one fails, none is waited for."""

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
        """The same call to every rank at once; results in order of ranks. Raises what the first failed rank raises."""
        return gather_or_cancel([handle.call(method, *args, **kwargs) for handle in self.handles])

    @overload
    def deal(self, method: Callable[[T_co, A], Awaitable[R]], shares: Sequence[A]) -> Coroutine[Any, Any, list[R]]: ...
    @overload
    def deal(self, method: Callable[[T_co, A], R], shares: Sequence[A]) -> Coroutine[Any, Any, list[R]]: ...
    def deal(self, method: Callable[..., object], shares: Sequence[object]) -> Coroutine[Any, Any, Sequence[object]]:
        """Call every rank at once, see `call`, with `shares[i]` as the only argument of rank i."""
        assert len(shares) == len(self), f"{len(shares)} shares for {len(self)} ranks"
        return gather_or_cancel(
            [handle.call(method, share) for handle, share in zip(self.handles, shares, strict=True)]
        )


class Processes(Protocol):
    """Starts processes, watches them, and leaves none behind."""

    step: int
    """The current step of the run, which the lines of their logs carry."""

    progress: Progress
    """Record of the calls that are waited for. Set before the first start."""

    @property
    def host(self) -> str:
        """Address of this machine at which every process reaches it."""

    def restart(self, role: str, rank: int, maker: Callable[[], T]) -> Handle[T]:
        """One process anew, in the place of the one that had this role and rank, which is ended if it still runs; on
        another machine where that of the place is gone. Returns when it is made; raises `ProcessError` as `start` does.
        """

    def add(self, seat: Layout, maker: Callable[[], T]) -> Handle[T]:
        """One process more, in a pool of its own, which is reserved for it. Returns when it is made; raises
        `ProcessError` as `start` does.
        """

    def remove(self, role: str, rank: int) -> None:
        """End one process that has a pool to itself, and give the pool back."""

    def start(self, role: str, makers: Sequence[Callable[[], T]]) -> Group[T]:
        """One process for each maker, rank i made by `makers[i]()` inside it; returns when all are made.

        Makers are pickled: `functools.partial` over importable callables. Raises what a maker raises, or `ProcessError`
        when the cluster has no room or the deadline passes; it says what is missing.
        """

    def dump_stacks(self) -> list[Path]:
        """Write the stacks of every thread of every process into their logs, whose names are returned. Thread-safe."""

    def close(self) -> None:
        """Ends every process; returns when they are gone. Safe to call twice."""
