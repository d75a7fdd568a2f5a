"""A tracker that fails or hangs does not stop a run, and its calls are made in another process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from skyrl.tracking.services.follower import Follower, WithLag
from skyrl.tracking.services.service import Known
from skyrl.tracking.tracker import LastMetrics
from tests.tracking.made_runs import append, make_run, service_run


def ran(folder: Path, steps: int, service: str, **settings: Any) -> list[str]:
    """What is said in a run of so many steps."""
    messages: list[str] = []
    follower = Follower(service_run(folder, service, first_step=0, **settings), messages.append)
    for step in range(1, steps + 1):
        append(folder, (step,))
        follower.log(step, {})
    follower.close()
    return messages


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ())
    assert ran(folder, 3, "tensorboard", finish_seconds=240.0) == []
    assert Known.read(folder / "trackers" / "tensorboard.json").step == 3


def test_a_tracker_that_cannot_be_started_is_reported_once_with_the_way_to_deliver_later(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ())
    missing = str(tmp_path / "no" / "python")
    messages = ran(folder, 3, "tensorboard", python=missing)
    assert (
        f"warning: tensorboard lacks the last 3 steps of this run; deliver them with `skyrl track {folder}"
        in messages[-1]
    )
    assert len(messages) <= 2 and all(
        "failed, and the run continues" in message and missing in message for message in messages[:-1]
    )


def test_a_tracker_that_fails_is_reported_once_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_at(tmp_path / "python", "echo traceback; echo QuotaError: no room left; exit 1")
    log = Said()
    follower = Follower(service_run(make_run(tmp_path / "run", ()), "wandb", python=program), log)
    monkeypatch.setattr("skyrl.tracking.services.follower.FIRST_PAUSE", 0.0)
    follower.log(1, {})
    log.wait_for_first()
    follower.log(2, {})
    follower.close()
    [failed, behind] = log.lines
    assert failed.startswith("warning: wandb failed, and the run continues without it: QuotaError: no room left\n")
    assert "lacks the last 3 steps" in behind  # 0 is a step, too


def test_a_tracker_that_hangs_is_killed_when_the_run_has_waited_long_enough(tmp_path: Path) -> None:
    program = program_at(tmp_path / "python", f"echo $$ > {tmp_path}/pid; while true; do sleep 1; done")
    folder = make_run(tmp_path / "run", ())
    log = Said()
    follower = Follower(service_run(folder, "wandb", python=program, finish_seconds=0.0), log)
    follower.log(0, {})
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        pass
    follower.close()
    follower._thread.join()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert "wandb lacks the last 1 steps" in log.lines[-1]


def test_a_tracker_that_took_every_step_and_is_still_sending_at_the_end_is_reported(tmp_path: Path) -> None:
    took_all = Known(step=0)
    folder = make_run(tmp_path / "run", ())
    took_all.write(tmp_path / "known.json")
    state = folder / "trackers" / "wandb.json"
    program = program_at(tmp_path / "python", f"cp {tmp_path}/known.json {state}; touch {tmp_path}/has; sleep 9999")
    state.parent.mkdir()
    log = Said()
    follower = Follower(service_run(folder, "wandb", python=program, finish_seconds=0.0), log)
    follower.log(0, {})
    while not (tmp_path / "has").is_file():
        pass
    follower.close()
    [line] = log.lines
    assert line.startswith("warning: wandb was still sending after trackers.finish_seconds = 0, and may lack steps of")
    assert f"`skyrl track {folder} --to wandb`" in line


def test_a_run_logs_how_far_its_trackers_are_behind(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ())
    follower = Follower(service_run(folder, "wandb", first_step=4, python=str(tmp_path / "none")), Said())
    last = LastMetrics()
    trackers = WithLag([last], [follower])
    trackers.log(5, {"loss": 1.0})
    assert last.metrics == {"loss": 1.0, "trackers/wandb_steps_behind": 0.0}
    trackers.log(6, {"loss": 1.0})
    assert last.metrics == {"loss": 1.0, "trackers/wandb_steps_behind": 1.0}  # step 5
    Known(step=6).write(folder / "trackers" / "wandb.json")
    trackers.log(7, {"loss": 1.0})
    assert last.metrics["trackers/wandb_steps_behind"] == 0.0
    trackers.close()


class Said:
    """Lines that are said, by whichever thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._first = threading.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._first.set()

    def wait_for_first(self) -> None:
        assert self._first.wait(240)


def program_at(path: Path, script: str) -> str:
    """A program in place of the interpreter."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(path, 0o755)
    return str(path)
