from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from skyrl.errors import Stopped
from skyrl.processes.progress import Progress, Watchdog
from skyrl.processes.shutdown import ShutdownSignal, seconds_until


def wait_until(told: list[str], count: int) -> None:
    deadline = time.monotonic() + 30
    while len(told) < count:
        assert time.monotonic() < deadline, told
        time.sleep(0.01)


def test_a_watchdog_names_what_is_waited_for_and_speaks_once_for_each_stall(tmp_path: Path) -> None:
    progress, told = Progress(), list[str]()
    others = [tmp_path / "engine-0.log"]
    watchdog = Watchdog(progress, 0.2, stacks=tmp_path / "stacks.txt", dump_others=lambda: others, on_stall=told.append)
    with progress.waiting_for("generate"), progress.waiting_for("engine-0 in InferenceEngine.generate"):
        wait_until(told, 1)
        time.sleep(0.5)
        assert len(told) == 1
        progress.note()
        wait_until(told, 2)
    watchdog.close()
    named = r"waits for: generate \(for \d+ s\); engine-0 in InferenceEngine.generate \(for \d+ s\)"
    assert re.search(named, told[0])
    assert told[0].endswith(f"{tmp_path / 'stacks.txt'}, {others[0]}")
    assert "wait_until" in (tmp_path / "stacks.txt").read_text(encoding="utf-8")


def test_what_ended_is_not_waited_for() -> None:
    progress = Progress()
    with progress.waiting_for("save"):
        assert len(progress.waits()) == 1
    assert progress.waits() == []


def test_a_deadline_is_a_time_or_a_moment() -> None:
    assert seconds_until(90.0) == 90.0
    assert -1 < seconds_until("2020-01-01T00:00:00+00:00") + time.time() - 1_577_836_800 < 1
    shutdown = ShutdownSignal(grace=30.0, stop_before=100.0)
    assert 69 < shutdown.seconds_left <= 70  # the grace period is kept free
    assert ShutdownSignal(grace=30.0).seconds_left == float("inf")


def test_a_run_is_told_when_its_deadline_is_as_near_as_the_grace_period() -> None:
    with ShutdownSignal(grace=1000.0, stop_before=1000.05) as shutdown:
        deadline = time.monotonic() + 30
        while not shutdown.requested:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(Stopped, match="Stopped before the deadline of trainer.faults.stop_before"):
            shutdown.check()


def test_only_the_first_reason_to_stop_counts() -> None:
    with ShutdownSignal(grace=30.0) as shutdown:
        shutdown.request("Stopped by one", exit_code=1)
        shutdown.request("Stopped by another")
        stopped = shutdown.stopped("All is well.")
    assert (str(stopped), stopped.exit_code) == ("Stopped by one. All is well.", 1)
