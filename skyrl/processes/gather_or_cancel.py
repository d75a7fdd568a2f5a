"""Runs calls concurrently: all results, or the first failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

R = TypeVar("R")


async def gather_or_cancel(
    calls: Sequence[Coroutine[Any, Any, R]],
    *,
    end_others: Callable[[BaseException], Awaitable[object]] | None = None,
    rank: Callable[[BaseException], int] = lambda error: 0,
) -> list[R]:
    """Every result, in order. At the first failure the other calls are cancelled, and it is raised once they are over.

    If calls must not be cancelled, `end_others` ends them; it is awaited with the first failure. All calls are then
    awaited, and the first of their errors with the lowest `rank` is raised.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else (set(), None)
        failures = _failures(task for task in tasks if task in done)
        if failures and end_others is not None:
            await end_others(failures[0])
            await asyncio.wait(tasks)
            failures = _failures(tasks)
        if failures:
            raise min(failures, key=rank)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await wait_all(tasks)


async def wait_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Return when all tasks are over, with any outcome; no error is reported as never retrieved."""
    pending = [task for task in tasks if not task.done()]
    if pending:
        await asyncio.gather(*pending, return_exceptions=True)
    _failures(tasks)


def _failures(tasks: Iterable[asyncio.Future[Any]]) -> list[BaseException]:
    errors = (None if task.cancelled() else task.exception() for task in tasks)
    return [error for error in errors if error is not None]
