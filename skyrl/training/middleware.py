"""Standing between the trainer and a collaborator: the loop mentions none of those who do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, cast

T = TypeVar("T")


def in_context(collaborator: T, **contexts: Callable[[], AbstractContextManager[Any]]) -> T:
    """`collaborator`, whose coroutine methods given as `method=context` are awaited in a context of their own."""

    async def inside(context: Callable[[], AbstractContextManager[Any]], method: Any, *args: Any, **kwargs: Any) -> Any:
        with context():
            return await method(*args, **kwargs)

    return replacing(collaborator, **{name: partial(inside, context) for name, context in contexts.items()})


def on_result(collaborator: T, **listeners: Callable[[Any], Awaitable[None]]) -> T:
    """`collaborator`, whose coroutine methods given as `method=listener` tell what they are about to return.

    Example: `on_result(rollouts, next_batch=count)` awaits `count(batch)` before it gives the batch on.
    """

    async def told(listener: Callable[[Any], Awaitable[None]], method: Any, *args: Any, **kwargs: Any) -> Any:
        result = await method(*args, **kwargs)
        await listener(result)
        return result

    return replacing(collaborator, **{name: partial(told, listener) for name, listener in listeners.items()})


def replacing(collaborator: T, **calls: Callable[..., Awaitable[Any]]) -> T:
    """`collaborator`, in the place of whose coroutine methods given as `method=call` `call(method, ...)` is awaited."""
    return cast(T, _Between(collaborator, calls))


class _Between:
    def __init__(self, collaborator: Any, calls: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
        self._collaborator, self._calls = collaborator, calls

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._collaborator, name)
        return partial(self._calls[name], attribute) if name in self._calls else attribute
