"""The panel of a run and `skyrl watch`: what they show is what lies in the run's folder."""

from __future__ import annotations

import io
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from rich.console import Console

from skyrl.cli.main import cli
from skyrl.errors import UserError
from skyrl.processes.orphans import process_id
from skyrl.processes.progress import Progress
from skyrl.runs.progress_file import ProgressFile
from skyrl.storage.json_files import record_of
from skyrl.tracking import run_progress
from skyrl.tracking.run_progress import Now, RunProgress
from skyrl.tracking.watching import follow, panel, sparkline

ROOT = Path(__file__).parents[2]


def tell(folder: Path, state: str = "running", **more: Any) -> None:
    """Replace `progress.json`."""
    now = {"state": state, "name": "skyrl / mine", "total_steps": 10, "first_step": 0, **more}
    (folder / "new").write_text(json.dumps(now))
    (folder / "new").replace(folder / "progress.json")


def record(folder: Path, step: int, **more: float) -> None:
    """Add a line to `metrics.jsonl`."""
    line = {"step": step, "reward/avg_raw_reward": step / 10, "timing/step": 2.0, "timing/generate": 1.5}
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({**line, **{name.replace("__", "/"): value for name, value in more.items()}}) + "\n")


def left(run: RunProgress) -> float | None:
    return run.seconds_left


def shown(run: RunProgress) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(panel(run))
    return console.export_text()


def test_the_panel_shows_the_run_its_step_and_the_last_warning(tmp_path: Path) -> None:
    waits = [("step", 3.0), ("generate", 2.9)]
    tell(tmp_path, waits=waits, details="3 of 128 samples", warning="alarm a: too long", memory_bytes=2_500_000_000)
    more = {"inference__engines_in_service": 2, "inference__engines_lost": 1, "async__staleness_mean": 0.5}
    for step in range(1, 5):
        record(tmp_path, step, trainer__tokens_per_second=1234.5, **more, async__staleness_max=2)
    run = RunProgress(tmp_path)
    run.look()
    text = shown(run)
    for part in (
        "skyrl / mine: running",
        "step 4/10, 0:12 left",
        "reward     0.400  ▁▃▆█",
        "tokens/s   1,234",
        "engines    2 in service, 1 lost",
        "staleness  0.50 steps, 2 at most",
        "memory     2.5 GB in this process",
        "> generate",
        "1.5 s",
        "now for 3 s",
        "3 of 128 samples",
        "alarm a: too long",
    ):
        assert part in text, f"{part!r} is missing in\n{text}"


def test_the_time_left_does_not_count_the_first_step_of_the_session(tmp_path: Path) -> None:
    """Steps 5 and 6 of a session that began at 3 took 2 s and 4 s with their evaluation: 4 more take 12 s."""
    tell(tmp_path, first_step=3)
    record(tmp_path, 3)
    record(tmp_path, 4, timing__step=500.0)
    run = RunProgress(tmp_path)
    run.look()
    assert left(run) is None
    record(tmp_path, 5)
    record(tmp_path, 6, timing__eval=2.0)
    run.look()
    assert (run.step, left(run)) == (6, 12.0)


def test_a_sparkline_goes_from_the_smallest_to_the_largest_value() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert (sparkline([3.0, 3.0]), sparkline([])) == ("▁▁", "")


def test_only_the_end_of_a_long_file_is_read_and_then_what_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(tmp_path)
    for step in range(1, 301):
        record(tmp_path, step, **({"eval__all__avg_score": 0.5} if step % 100 == 0 else {}))
    monkeypatch.setattr(run_progress, "_TAIL", 1000)
    read: list[bytes] = []

    def counted(line: bytes) -> dict[str, Any] | None:
        read.append(line)
        return record_of(line)

    monkeypatch.setattr(run_progress, "record_of", counted)
    run = RunProgress(tmp_path)
    run.look()
    assert 5 < len(read) < 20 and sum(map(len, read)) <= 1000
    assert (run.step, run.evaluation) == (300, (300, 0.5))
    assert list(run.rewards) == [step / 10 for step in range(301 - len(read), 301)]
    record(tmp_path, 301)
    run.look()
    assert (run.step, json.loads(read[-1])["step"], json.loads(read[-2])["step"]) == (301, 301, 300)


def test_a_line_that_is_half_written_waits_and_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    tell(tmp_path)
    record(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 2, ')
    run = RunProgress(tmp_path)
    run.look()
    assert run.step == 1
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('"reward/avg_raw_reward": 0.5}\n')
    run.look()
    assert (run.step, list(run.rewards)) == (2, [0.1, 0.5])
    (tmp_path / "other").write_text('{"step": 1, "reward/avg_raw_reward": 0.1}\n')
    (tmp_path / "other").replace(tmp_path / "metrics.jsonl")
    run.look()
    assert (run.step, list(run.rewards)) == (1, [0.1])


ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    1.5,
    10**30,
    10**400,
    float("inf"),
    "x",
    [],
    [[]],
    {},
    "\ud800",
    [["step", None]],
    [["a", 10**400]],
)


@pytest.mark.parametrize(
    "name", [*(field.name for field in attrs.fields(Now)), "", "timing/step", "reward/avg_raw_reward"]
)
def test_a_panel_is_drawn_whatever_a_file_of_the_run_holds(name: str, tmp_path: Path) -> None:
    content = attrs.asdict(Now(name="mine", total_steps=9, waits=(("step", 1.0),), state="running"))
    for value in ODD:
        (tmp_path / "progress.json").write_text(json.dumps({**content, name: value} if name else value))
        lines = [{"step": step, "timing/step": 1.0, "reward/avg_raw_reward": 0.5, name: value} for step in (1, 2, 3)]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        run = RunProgress(tmp_path)
        run.look()
        assert run.step == 3
        assert shown(run).encode()


def test_news_are_told_from_silence(tmp_path: Path) -> None:
    now = 100.0
    tell(tmp_path)
    run = RunProgress(tmp_path, clock=lambda: now)
    assert run.look()
    now += 75
    assert not run.look()
    assert "no news for 1:15" in shown(run)
    record(tmp_path, 1)
    assert run.look()
    assert "no news" not in shown(run)


def test_following_says_each_new_step_and_ends_with_the_run(tmp_path: Path) -> None:
    lines: list[str] = []
    tell(tmp_path)
    record(tmp_path, 1)

    def say(line: str) -> None:
        """Two steps more come at once, and then the end."""
        lines.append(line)
        if len(lines) == 1:
            record(tmp_path, 2)
            record(tmp_path, 3)
        if len(lines) == 3:
            tell(tmp_path, "finished")

    assert follow(tmp_path, say, threading.Event(), look_every=0.001) == "finished"
    assert [line.partition("  reward")[0] for line in lines] == ["step  1/10", "step  2/10", "step  3/10"]


@pytest.mark.parametrize(
    ("of", "state"),
    [
        ({"process": process_id(os.getpid()), "host": socket.gethostname()}, "running"),
        (
            {"process": f"{os.getpid()}:1", "host": socket.gethostname()},
            "gone: its process ended without a word, at step 4 of 10; the run is unfinished",
        ),
        ({"process": "1:1", "host": "another"}, "running"),
        ({}, "running"),  # of an earlier version
        ({"process": "1:1", "host": socket.gethostname(), "state": "finished"}, "finished"),
    ],
)
def test_a_run_whose_process_is_gone_is_not_running(of: dict[str, str], state: str, tmp_path: Path) -> None:
    tell(tmp_path, **of)
    record(tmp_path, 4)
    run = RunProgress(tmp_path)
    run.look()
    assert run.state == state
    assert f"skyrl / mine: {state}" in shown(run)


@pytest.mark.parametrize(
    ("of", "code"),
    [
        ({"process": f"{os.getpid()}:1", "host": socket.gethostname()}, 1),
        ({"state": "failed"}, 1),
        ({"state": "stopped"}, 0),
        ({"state": "finished"}, 0),
    ],
)
def test_the_exit_code_of_watch_tells_whether_the_run_failed(of: dict[str, str], code: int, tmp_path: Path) -> None:
    tell(tmp_path, **of)
    record(tmp_path, 4)
    for options in ([], ["--once"], ["--once", "--json"]):
        result = CliRunner().invoke(cli, ["watch", str(tmp_path), *options])
        assert result.exit_code == code
    assert json.loads(result.stdout)["ok"] == (code == 0)


def test_a_folder_that_no_run_writes_into_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no progress.json"):
        follow(tmp_path, print, threading.Event())


def test_the_progress_of_a_session_is_written_with_its_end(tmp_path: Path) -> None:
    progress, run = Progress(), RunProgress(tmp_path)
    progress.warning = "token hf_" + "a" * 34
    with ProgressFile(tmp_path, progress, name="a", total_steps=3, first_step=1) as file:
        with progress.waiting_for("generate"):
            file.write("running")
        run.look()
        assert ([name for name, _ in run.now.waits], run.now.total_steps, run.now.first_step) == (["generate"], 3, 1)
        assert run.now.memory_bytes > 1_000_000
        assert "aaaa" not in run.now.warning, "no secret"
    run.look()
    assert run.now.state == "finished"
    with (
        pytest.raises(ValueError, match="mine"),
        ProgressFile(tmp_path, progress, name="a", total_steps=3, first_step=1),
    ):
        raise ValueError("mine")
    run.look()
    assert run.now.state == "failed"


@pytest.mark.long
def test_on_a_terminal_the_command_draws_the_panel_until_the_run_ends(tmp_path: Path) -> None:
    tell(tmp_path)
    record(tmp_path, 3)
    parent_end, child_end = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-m", "skyrl.cli", "watch", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=child_end, stderr=child_end, stdin=child_end, env=environ)
    os.close(child_end)
    seen = ""
    while not ("step 3/10" in seen and "reward" in seen):
        seen += os.read(parent_end, 4096).decode(errors="replace")
    tell(tmp_path, "finished")
    try:
        while part := os.read(parent_end, 4096):
            seen += part.decode(errors="replace")
    except OSError:  # how a terminal ends on Linux
        pass
    os.close(parent_end)
    assert process.wait() == 0
    assert f"{tmp_path}: finished" in seen
