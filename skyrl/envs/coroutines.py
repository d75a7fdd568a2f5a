"""Environments, reward functions and tools that are written with `async def`.

    settled(env.step(answer))     the step, whether `step` is a function or a coroutine

All coroutines of a process run on one event loop in a thread of its own, so that what an environment opens in `init`
(a session, a connection) still belongs to the loop of its `step`. The caller waits in a thread of its own; when it
misses its deadline, the coroutine is cancelled. Code that blocks inside a coroutine holds up all others: write it as a
plain function.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, overload

T = TypeVar("T")

_caller = threading.local()
_making = threading.Lock()


@overload
def settled(value: Awaitable[T]) -> T: ...
@overload
def settled(value: T) -> T: ...
def settled(value: object) -> object:
    """The value, or what it becomes if it is awaited. Raises whatever a coroutine raises."""
    if not inspect.isawaitable(value):
        return value
    with _making:  # `cache` alone lets two threads make a loop each
        loop = _loop()
    future = asyncio.run_coroutine_threadsafe(_outcome(value), loop)
    getattr(_caller, "begun", []).append(future)
    result, error = future.result()
    if error is not None:
        raise error
    return result


@contextmanager
def noted(begun: list[Future[Any]]) -> Iterator[None]:
    """What this thread waits for in `settled` is noted in `begun`, so that another thread can cancel it."""
    _caller.begun = begun
    try:
        yield
    finally:
        del _caller.begun


async def _outcome(value: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Errors as data: some of them would end the loop."""
    try:
        return await value, None
    except BaseException as error:  # noqa: BLE001  # raised again by whoever waits
        return None, error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="coroutines of environments").start()
    return loop
