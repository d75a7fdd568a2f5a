"""Trackers of the user's own, named by import path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyrl.config import ConfigError, TrainerConfig
from skyrl.tracking.factory import trackers_of
from skyrl.tracking.tracker import TrackedRun, Tracker
from tests.other_environments import python_with

NOTES = """
class Notes:
    def __init__(self, run):
        self.run, self.noted = run, []
    def log(self, step, metrics):
        self.noted.append((step, metrics))
    def close(self):
        self.noted.append("closed")

def made(run):
    return Notes(run)

kept = Notes(None)

class Failing(Notes):
    def log(self, step, metrics):
        raise ConnectionError("no route")
"""


@pytest.fixture
def notes(tmp_path: Path) -> str:
    """A module with trackers."""
    (tmp_path / "notes.py").write_text(NOTES)
    return f"{tmp_path}/notes.py"


def trackers(tmp_path: Path, logger: str | tuple[str, ...], messages: list[str]) -> list[Tracker]:
    """The trackers of a run of three steps that continues after the first."""
    trainer = TrainerConfig(logger=logger, run_path=str(tmp_path), project_name="p", run_name="r")
    return trackers_of(trainer, total_steps=3, first_step=1, say=messages.append)


@pytest.mark.parametrize("name", ["Notes", "made", "kept"])
def test_a_class_a_function_or_an_object_is_a_tracker(tmp_path: Path, notes: str, name: str) -> None:
    tracker: Any = trackers(tmp_path, ("console", f"{notes}:{name}"), [])[1]
    inner = tracker._tracker
    tracker.log(2, {"loss": 0.5})
    tracker.close()
    assert inner.noted[-2:] == [(2, {"loss": 0.5}), "closed"]
    facts = TrackedRun(project="p", name="r", folder=tmp_path, total_steps=3, first_step=1)
    assert inner.run == (None if name == "kept" else facts)


def test_a_tracker_that_fails_is_reported_once_and_the_run_goes_on(tmp_path: Path, notes: str) -> None:
    messages: list[str] = []
    [failing] = trackers(tmp_path, f"{notes}:Failing", messages)
    for step in (2, 3):
        failing.log(step, {})
    failing.close()
    assert len(messages) == 1
    assert f"{notes}:Failing failed in log step 2: ConnectionError: no route" in messages[0]


UNUSABLE = {
    "class X: ...": "is not a tracker: it has no log and no close",
    "class X:\n def log(self, step, metrics): ...": "it has no close",
    "class X:\n def __init__(self): ...\n def log(self): ...\n def close(self): ...": "cannot be created from the run",
    "def X(run): return 1": "it has no log and no close",
    "X = 1": "it has no log and no close",
    "Y = 1": "has no 'X'",
}


@pytest.mark.parametrize(("source", "message"), UNUSABLE.items())
def test_what_is_no_tracker_is_refused(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "unusable.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as refused:
        trackers(tmp_path, f"{tmp_path}/unusable.py:X", [])
    assert [problem.path for problem in refused.value.problems] == ["trainer.logger"]


PROGRAM = """
import sqlite3, sys, types
from trackio_run import Trackio
for first, steps in ((0, (0, 1, 2)), (2, (3,))):
    tracker = Trackio(types.SimpleNamespace(project="p", name="r", first_step=first))
    for step in steps:
        tracker.log(step, {"loss": 0.5})
    tracker.close()
stored = sqlite3.connect(sys.argv[1]).execute("select run_name, step from metrics order by step").fetchall()
assert stored == [("r", 0), ("r", 1), ("r", 2), ("r", 3)], stored
"""


@pytest.mark.long
def test_the_tracker_of_the_page_continues_one_run_of_trackio(tmp_path: Path) -> None:
    (tmp_path / "trackio_run.py").write_text(of_the_page())
    folder = tmp_path / "trackio"
    python = python_with("trackers-trackio", ["trackio==0.43.0"])
    environ = {**os.environ, "TRACKIO_DIR": str(folder), "PYTHONPATH": str(tmp_path)}
    subprocess.run([python, "-c", PROGRAM, folder / "p.db"], env=environ, check=True)


def of_the_page() -> str:
    """The module that docs/tracking.md prints."""
    page = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text(encoding="utf-8")
    return page.partition("# trackio_run.py\n")[2].partition("```")[0]


def test_the_tracker_of_the_page_hands_metrics_to_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio_run.py").write_text(of_the_page())
    calls: list[tuple[object, ...]] = []
    package: Any = ModuleType("trackio")
    package.init = lambda **kwargs: calls.append(("init", kwargs))
    package.log = lambda metrics, step: calls.append(("log", metrics, step))
    package.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "trackio", package)
    [tracker] = trackers(tmp_path, f"{tmp_path}/trackio_run.py:Trackio", [])
    tracker.log(2, {"loss": 0.5})
    tracker.close()
    assert calls == [
        ("init", {"project": "p", "name": "r", "resume": "allow"}),
        ("log", {"loss": 0.5}, 2),
        ("finish",),
    ]
