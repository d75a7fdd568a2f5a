"""A save that goes on while the run does."""

from __future__ import annotations

import asyncio
import inspect
import logging

import pytest

from skyrl.checkpoint.pending import PendingSave
from skyrl.errors import RunError


class Slow:
    """A save that ends when it is let."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.may_end, self.ended = False, asyncio.Event(), False
        self._error = error

    async def run(self) -> None:
        self.begun = True
        await self.may_end.wait()
        if self._error:
            raise self._error
        self.ended = True


async def test_a_save_has_begun_and_not_ended_when_the_run_goes_on() -> None:
    pending, save = PendingSave(), Slow()
    await pending.start(save.run())
    assert (save.begun, save.ended) == (True, False)
    save.may_end.set()
    await pending.finish()
    assert save.ended


async def test_a_second_save_begins_when_the_first_has_ended() -> None:
    pending, first, second = PendingSave(), Slow(), Slow()
    await pending.start(first.run())
    starting = asyncio.ensure_future(pending.start(second.run()))
    for _ in range(10):  # turns of the event loop, in which whoever may go on does
        await asyncio.sleep(0)
    assert (first.ended, second.begun) == (False, False)
    first.may_end.set()
    await starting
    assert (first.ended, second.begun) == (True, True)
    second.may_end.set()
    await pending.finish()


@pytest.mark.parametrize("where", ["at the next save", "at the end"])
async def test_what_a_save_failed_with_is_raised_once(where: str) -> None:
    pending, save, later = PendingSave(), Slow(RunError("the disk is full")), Slow()
    await pending.start(save.run())
    save.may_end.set()
    second = later.run()
    with pytest.raises(RunError, match="the disk is full"):
        await (pending.start(second) if where == "at the next save" else pending.finish())
    assert not later.begun
    assert inspect.getcoroutinestate(second) == ("CORO_CLOSED" if where == "at the next save" else "CORO_CREATED")
    second.close()
    await pending.finish()


async def test_the_end_of_a_failed_run_waits_for_the_save_and_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    pending, good, bad = PendingSave(), Slow(), Slow(RunError("the disk is full"))
    await pending.start(good.run())
    good.may_end.set()
    await pending.finish_after(ZeroDivisionError())
    assert good.ended
    await pending.start(bad.run())
    bad.may_end.set()
    with caplog.at_level(logging.ERROR):
        await pending.finish_after(ZeroDivisionError())
    assert "the disk is full (and the run itself ended with ZeroDivisionError)" in caplog.text


async def test_whoever_stops_waiting_does_not_stop_the_save() -> None:
    pending, save = PendingSave(), Slow()
    await pending.start(save.run())
    waiting = asyncio.ensure_future(pending.finish())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    save.may_end.set()
    await pending.finish()
    assert save.ended


async def test_a_save_that_fails_of_what_ended_the_run_does_not_say_it_again(caplog: pytest.LogCaptureFixture) -> None:
    lost = RunError("policy-1 died")
    pending, bad = PendingSave(), Slow(lost)
    await pending.start(bad.run())
    bad.may_end.set()
    with caplog.at_level(logging.ERROR):
        await pending.finish_after(lost)
    assert caplog.text == ""
