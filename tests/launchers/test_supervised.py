"""A launched command: it is asked to stop once, and its state is in a file."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from skyrl.launchers.job import STATE, report_in
from skyrl.launchers.supervised import supervise
from skyrl.tracking.watching import follow

WAITS = """
import signal, sys
def stop(number, frame):
    print("asked", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""


def state(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / STATE).read_text())
    return content


@pytest.mark.parametrize(("code", "word"), [(0, "finished"), (75, "stopped"), (130, "stopped"), (1, "failed")])
def test_the_end_of_a_command_is_stored(code: int, word: str, tmp_path: Path) -> None:
    assert supervise([sys.executable, "-c", f"import sys; sys.exit({code})"], tmp_path, os.environ) == code
    assert (state(tmp_path)["state"], state(tmp_path)["code"]) == (word, code)


def test_a_command_that_is_killed_has_failed(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert supervise([sys.executable, "-c", program], tmp_path, os.environ) == 137
    assert state(tmp_path)["state"] == "failed"


ENDS = """
import os, signal, sys
from pathlib import Path
from skyrl.processes.progress import Progress
from skyrl.runs.progress_file import ProgressFile
folder = Path(sys.argv[1])
with ProgressFile(folder, Progress(), name="mine", total_steps=3, first_step=0):
    (folder / "metrics.jsonl").write_text('{"step": 1}\\n')
    exec(sys.argv[2])
"""


GONE = "gone: its process ended without a word, at step 1 of 3; the run is unfinished"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ends", "code", "state", "watched"),
    [
        ("pass", 0, "finished", "finished"),
        ("sys.exit(0)", 1, "failed", "failed"),
        ("sys.exit(75)", 75, "stopped", "failed"),
        ("raise ValueError", 1, "failed", "failed"),
        ("os._exit(0)", 1, "failed", GONE),
        ("os._exit(75)", 75, "stopped", GONE),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "failed", GONE),
        ("os.execv('/bin/true', ['true'])", 1, "failed", GONE),
    ],
)
def test_a_run_that_ends_in_the_middle_has_not_finished(
    ends: str, code: int, state: str, watched: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert supervise([sys.executable, "-c", ENDS, str(tmp_path), ends], tmp_path, environ) == code
    assert (report_in(tmp_path)["state"], report_in(tmp_path)["code"]) == (state, code)
    assert follow(tmp_path, lambda line: None, threading.Event()) == watched
    assert ("did not reach its end" in capfd.readouterr().err) == (code == 1 and "raise" not in ends)
    assert supervise(["true"], tmp_path, os.environ) == 0  # what is left of it counts no more


def test_a_file_asks_the_command_to_stop(tmp_path: Path) -> None:
    ready, stop_file = tmp_path / "ready", tmp_path / "ask"
    thread = threading.Thread(target=_then_touch, args=(ready, stop_file))
    thread.start()
    assert supervise([sys.executable, "-c", WAITS, str(ready)], tmp_path, os.environ, stop_file) == 75
    thread.join()
    assert state(tmp_path)["state"] == "stopped"


def test_signals_of_this_process_are_passed_on(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    thread = threading.Thread(target=_then_signal, args=(ready,))
    thread.start()
    assert supervise([sys.executable, "-c", WAITS, str(ready)], tmp_path, os.environ) == 75
    thread.join()


def _then_touch(ready: Path, stop_file: Path) -> None:
    _wait(ready)
    stop_file.touch()


def _then_signal(ready: Path) -> None:
    _wait(ready)
    os.kill(os.getpid(), 15)
    os.kill(os.getpid(), 15)  # a scheduler sends it more than once


def _wait(file: Path) -> None:
    waiting = threading.Event()
    while not file.exists():
        waiting.wait(0.02)
