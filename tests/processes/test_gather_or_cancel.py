"""Calls side by side: results in order, or the first failure with nothing left running."""

from __future__ import annotations

import asyncio

import pytest

from skyrl.errors import ProcessError, SkyRLError
from skyrl.processes.gather_or_cancel import gather_or_cancel


async def value(number: int) -> int:
    await asyncio.sleep(0)
    return number


async def fail(error: Exception, after: asyncio.Event | None = None) -> int:
    if after is not None:
        await after.wait()
    raise error


async def test_results_come_in_the_order_of_the_calls() -> None:
    assert await gather_or_cancel([value(3), value(1), value(2)]) == [3, 1, 2]
    assert await gather_or_cancel([]) == []


async def test_the_first_failure_is_raised_when_the_other_calls_are_over() -> None:
    ended: list[str] = []

    async def waits() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cancelled")
        return 0

    with pytest.raises(ValueError, match="first"):
        await gather_or_cancel([waits(), fail(ValueError("first"))])
    assert ended == ["cancelled"]


async def test_cancelling_the_caller_cancels_the_calls() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(gather_or_cancel([waits()]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_calls_that_must_not_be_cancelled_are_ended_and_the_cause_is_raised() -> None:
    aborted, reasons = asyncio.Event(), list[str]()

    async def abort(error: BaseException) -> None:
        reasons.append(str(error))
        aborted.set()

    with pytest.raises(ProcessError, match="the rank died"):
        await gather_or_cancel(
            [fail(SkyRLError("echo")), fail(ProcessError("the rank died"), after=aborted)],
            end_others=abort,
            rank=lambda error: 0 if isinstance(error, ProcessError) else 1,
        )
    assert reasons == ["echo"]
