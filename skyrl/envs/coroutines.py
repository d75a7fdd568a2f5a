"""Support for environments, reward functions and tools that are written with `async def`.

    awaited(env.step(answer))     the result, whether `step` is a function or a coroutine

All coroutines of a process run on one event loop in a dedicated thread, so that a session or connection opened in
`init` belongs to the same loop in `step`. A caller of `awaited` waits in its thread; what a rollout calls itself is
awaited without one (`rollout/env_calls.py`). When a call misses its deadline, the coroutine is cancelled. Code that
blocks inside a coroutine holds up all others: write it as a plain function.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar, overload

T = TypeVar("T")

_caller = threading.local()
_making = threading.Lock()


@overload
def awaited(value: Awaitable[T]) -> T: ...
@overload
def awaited(value: T) -> T: ...
def awaited(value: object) -> object:
    """The value, or its result if it is a coroutine. Raises whatever a coroutine raises."""
    if not inspect.isawaitable(value):
        return value
    future = begin(value)
    getattr(_caller, "begun", []).append(future)
    result, error = future.result()
    if error is not None:
        raise error
    return result


def close_all(*closed: Any) -> None:
    """Call `close` of each, which may be a coroutine, the last one first; the others are closed even if one raises."""
    with ExitStack() as closing:
        for item in closed:
            closing.callback(lambda close: awaited(close()), item.close)


def begin(value: Awaitable[T]) -> Future[tuple[T | None, BaseException | None]]:
    """Begin to await `value` on the event loop of all coroutines: its result, or what it raises."""
    with _making:  # with `cache` alone, two threads could each make a loop
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(_outcome(value), loop)


@contextmanager
def noted(futures: list[Future[Any]]) -> Iterator[None]:
    """Record in `futures` what this thread waits for in `awaited`, so that another thread can cancel it."""
    _caller.begun = futures
    try:
        yield
    finally:
        del _caller.begun


async def _outcome(value: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """The result or the error of awaiting `value`: errors are returned, because some of them would end the loop."""
    try:
        return await value, None
    except BaseException as error:  # noqa: BLE001  # raised again in the waiting thread
        return None, error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="coroutines of environments").start()
    return loop
