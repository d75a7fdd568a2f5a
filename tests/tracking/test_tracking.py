from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from skyrl.tracking.console import Console
from skyrl.tracking.curve import draw_reward_curve
from skyrl.tracking.jsonlines import JsonLines, MetricsFile
from skyrl.tracking.timing import Clock
from skyrl.tracking.tracker import Trackers


def test_metrics_come_back_as_they_were_logged(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    Trackers([MetricsFile(lines)]).log(3, {"reward/avg_raw_reward": 0.25})
    assert list(lines.read()) == [{"step": 3, "reward/avg_raw_reward": 0.25}]


def test_text_that_was_sampled_stays_on_its_line_for_every_reader(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.jsonl"
    record = {"step": 1, "response": "a\x85b\u2028c\u2029d\re\x1ef\u00e9"}
    JsonLines(file).append(record)
    JsonLines(file).forget_after(1)
    [line] = file.read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == record and "\u00e9" in line


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "rew', encoding="utf-8")
    assert list(JsonLines(file).read()) == [{"step": 1}]


def test_what_happened_after_the_step_that_a_run_resumes_from_is_forgotten(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(5):
        lines.append({"step": step})
    lines.forget_after(2)
    assert [record["step"] for record in lines.read()] == [0, 1, 2]


def test_without_a_terminal_every_step_is_one_plain_line() -> None:
    stream = io.StringIO()
    console = Console(total_steps=20, stream=stream)
    console.log(0, {"eval/all/avg_score": 0.125})
    console.log(1, {"reward/avg_raw_reward": 0.5, "trainer/tokens_per_second": 1234.5})
    console.close()
    first, second = stream.getvalue().splitlines()
    assert first == "step  0/20  evaluation 0.125"
    assert second.startswith("step  1/20  reward 0.500  1,234 tokens/s  ")
    assert second.endswith(" left")


def test_measured_seconds_are_taken_once() -> None:
    clock = Clock()
    with clock.measure("working"):
        pass
    assert list(clock.take()) == ["timing/working"]
    assert clock.take() == {}


def test_the_curve_is_a_picture_even_of_a_run_that_only_evaluated(tmp_path: Path) -> None:
    for number, records in enumerate(([{"step": 0, "eval/all/avg_score": 0.1}], [])):
        picture = tmp_path / f"{number}.png"
        draw_reward_curve(records, picture, "title")
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("to_a_terminal", [True, False])
def test_lines_that_a_reward_prints_stand_above_the_progress_line_or_in_their_file(
    to_a_terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out, err = Terminal() if to_a_terminal else io.StringIO(), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    console = Console(total_steps=2, folder=tmp_path)
    print("from the reward")
    console.close()
    assert ("from the reward\n" in out.getvalue()) is not to_a_terminal
    assert ("\x1b[2Kfrom the reward\n" in err.getvalue()) is to_a_terminal  # the line is cleared before
