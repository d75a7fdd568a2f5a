"""Everything in the process of the command: a handle is the object itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from skyrl.processes.calls import apply, name_of
from skyrl.processes.handles import Group

T = TypeVar("T")


class LocalHandle(Generic[T]):
    """An object of this process. Deadlines mean nothing here: whoever would watch is the one who computes."""

    def __init__(self, name: str, target: T) -> None:
        self.name, self.target = name, target

    def within(self, seconds: float) -> LocalHandle[T]:
        return self

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        name_of(method)  # what only works in this process is refused in every one
        result = apply(self.target, method, args, kwargs)
        return await result if inspect.isawaitable(result) else result


class InProcess:
    """`Processes` without a process: one rank of each role."""

    step = 0
    host = "127.0.0.1"

    def start(self, role: str, makers: Sequence[Callable[[], T]]) -> Group[T]:
        (maker,) = makers  # check() refuses more ranks than one here
        return Group([LocalHandle(f"{role}-0", maker())])

    def close(self) -> None:
        """Nothing was started."""
