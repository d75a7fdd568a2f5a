from __future__ import annotations

import asyncio
import fcntl
import itertools
import re
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from skyrl.errors import ProcessError, Stopped
from skyrl.processes.progress import Progress, Watchdog
from skyrl.processes.shutdown import ShutdownSignal, seconds_until
from tests.processes.clusters import soon


class Watched(Progress):
    """Says how long there was no progress, and notices each time that the watchdog asks."""

    silent = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore(0)

    @property
    def seconds_without(self) -> float:
        self.asked.release()
        return self.silent

    def wait_for_looks(self, count: int) -> None:
        """Returns when the watchdog has looked so many times from now on, one that is under way not counted."""
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(count + 1):
            assert self.asked.acquire(timeout=60)


def test_a_watchdog_names_what_is_waited_for_and_speaks_once_for_each_stall(tmp_path: Path) -> None:
    progress, messages = Watched(), list[str]()
    others = [tmp_path / "engine-0.log"]
    watchdog = Watchdog(
        progress, 0.1, stacks=tmp_path / "stacks.txt", dump_others=lambda: others, on_stall=messages.append
    )
    with progress.waiting_for("generate"), progress.waiting_for("engine-0 in InferenceEngine.generate"):
        counts = []
        for progress.silent in (0.09, 0.11, 0.0, 7.0):
            progress.wait_for_looks(5)
            counts.append(len(messages))
    watchdog.close()
    assert counts == [0, 1, 1, 2]
    named = r"is waiting for: generate \(for \d+ s\); engine-0 in InferenceEngine.generate \(for \d+ s\)"
    assert re.search(named, messages[0])
    assert messages[0].endswith(f"{tmp_path / 'stacks.txt'}, {others[0]}")
    assert messages[1].startswith("no progress for 7 s ")
    assert "wait_for_looks" in (tmp_path / "stacks.txt").read_text(encoding="utf-8")


def test_time_in_which_the_process_was_stopped_is_no_stall(tmp_path: Path) -> None:
    stopped, looked = [0.0], threading.Semaphore(0)

    class Clocked(Progress):
        def note(self) -> None:
            super().note()
            looked.release()

    messages = list[str]()
    progress = Clocked(lambda: stopped[0])
    watchdog = Watchdog(progress, 0.2, stacks=tmp_path / "s", dump_others=tuple, on_stall=messages.append)
    assert looked.acquire(timeout=60)  # as it begins
    for _ in range(2):
        stopped[0] += 3_000.0
        assert looked.acquire(timeout=60), "it counted on while the process was stopped"
    watchdog.close()
    assert messages == []


def test_what_ended_is_not_waited_for() -> None:
    progress = Progress()
    with progress.waiting_for("save"):
        assert len(progress.waits()) == 1
    assert progress.waits() == []


def test_a_deadline_is_a_time_or_a_moment() -> None:
    assert seconds_until(90.0) == 90.0
    before = time.time()
    now = 1_577_836_800 - seconds_until("2020-01-01T00:00:00+00:00")
    assert before - 0.001 <= now <= time.time() + 0.001
    before = time.monotonic()
    left = ShutdownSignal(grace=30.0, stop_before=100.0).seconds_left
    assert 70 - (time.monotonic() - before) <= left <= 70  # the grace period is kept free
    assert ShutdownSignal(grace=30.0).seconds_left == float("inf")


def test_a_run_is_told_when_its_deadline_is_as_near_as_the_grace_period() -> None:
    with ShutdownSignal(grace=1000.0, stop_before=1000.05) as shutdown:
        deadline = time.monotonic() + 30
        while not shutdown.requested:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(Stopped, match="Stopped before the deadline of trainer.faults.stop_before"):
            shutdown.check()


def test_the_grace_period_does_not_run_while_the_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, looked = [0.0], threading.Semaphore(0)

    def clock() -> float:
        looked.release()
        return seconds[0]

    ended = list[str]()
    monkeypatch.setattr("skyrl.processes.shutdown._WAKES_EVERY", 0.02)
    monkeypatch.setattr(ShutdownSignal, "_end_at_once", lambda self, reason: ended.append(reason))
    with ShutdownSignal(grace=30.0, clock=clock) as shutdown:
        shutdown.request("Stopped by a test")
        for stopped in (0.0, 1_000.0):
            seconds[0] += stopped
            while looked.acquire(blocking=False):
                pass
            for _ in range(8):
                assert looked.acquire(timeout=60)
    assert ended == []


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("hangs", [True, False])
async def test_a_call_that_the_end_does_not_need_gets_a_third_of_the_grace_period(
    stops: bool, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by a second with each look at it."""
    monkeypatch.setattr("skyrl.processes.shutdown._WAKES_EVERY", 0.001)
    monkeypatch.setattr(ShutdownSignal, "_end_at_once", lambda self, reason: None)
    comes = asyncio.Event()
    with ShutdownSignal(grace=30.0, clock=itertools.count().__next__) as shutdown, shutdown.in_loop():
        if stops:
            shutdown.request("Stopped by a test")
        if not hangs:
            comes.set()
        elif not stops:
            asyncio.get_running_loop().call_later(0.05, comes.set)
        assert await shutdown.in_time(comes.wait()) == (not (stops and hangs))


def test_a_process_with_thousands_of_open_files_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`select.select` refuses descriptors above 1023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    pair = socket.socketpair

    def high() -> tuple[socket.socket, socket.socket]:
        one, other = pair()
        with one, other:
            first, second = (socket.socket(fileno=fcntl.fcntl(sock, fcntl.F_DUPFD, 1500)) for sock in (one, other))
        return first, second

    try:
        monkeypatch.setattr("skyrl.processes.shutdown.socket.socketpair", high)
        with ShutdownSignal(grace=1000.0, stop_before=1000.05) as shutdown, shutdown.in_loop():
            assert soon(lambda: shutdown.requested)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_the_error_of_a_call_that_the_end_does_not_need_is_raised() -> None:
    async def fails() -> None:
        raise ProcessError("it died")

    with ShutdownSignal(grace=30.0) as shutdown, pytest.raises(ProcessError, match="it died"):
        await shutdown.in_time(fails())


def test_only_the_first_reason_to_stop_counts() -> None:
    with ShutdownSignal(grace=30.0) as shutdown:
        shutdown.request("Stopped by one", exit_code=1)
        shutdown.request("Stopped by another")
        stopped = shutdown.stopped("All is well.")
    assert (str(stopped), stopped.exit_code) == ("Stopped by one. All is well.", 1)
