"""Several teachers on the same ranks: each is called as if it had ranks of its own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar, overload

from skyrl.config import TrainerConfig
from skyrl.learners.ranks import ALONE, Ranks
from skyrl.learners.workers.roles import TeacherWorker
from skyrl.processes.calls import apply
from skyrl.processes.handles import Group, Handle

P = ParamSpec("P")
R = TypeVar("R")


class TeachersWorker:
    """All teachers of a run on one rank of their role, by path. They share its process group."""

    def __init__(self, trainer: TrainerConfig, *, ranks: Ranks = ALONE) -> None:
        """Loads the models of `trainer.teacher`."""
        paths = trainer.teacher.local_paths
        self._teachers = {path: TeacherWorker(trainer, path=path, ranks=ranks) for path in paths}

    async def ask(self, path: str, method: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        """The result of a method of one of the teachers."""
        result = apply(self._teachers[path], method, args, kwargs)
        return await result if inspect.isawaitable(result) else result


class TeacherHandle:
    """Handle of one of the teachers on a rank."""

    def __init__(self, rank: Handle[TeachersWorker], path: str) -> None:
        self._rank, self._path = rank, path

    @property
    def name(self) -> str:
        return self._rank.name

    def with_deadline(self, seconds: float) -> TeacherHandle:
        return TeacherHandle(self._rank.with_deadline(seconds), self._path)

    @overload
    async def call(
        self, method: Callable[Concatenate[TeacherWorker, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call(
        self, method: Callable[Concatenate[TeacherWorker, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    async def call(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        return await self._rank.call(TeachersWorker.ask, self._path, method, *args, **kwargs)


def ranks_of_teacher(ranks: Group[TeachersWorker], path: str) -> Group[TeacherWorker]:
    """The ranks of one of the teachers that `ranks` hold."""
    return Group([TeacherHandle(rank, path) for rank in ranks.handles])
