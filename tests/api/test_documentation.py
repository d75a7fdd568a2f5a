"""The examples of docs/python.md run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import skyrl
from skyrl.training.callbacks import EVENTS
from skyrl.tree import get_at
from tests.api.python_cells import run_cells, write_run

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
CELLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.long
def test_the_examples_of_the_page_run(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(nano, tmp_path)
    values = run_cells(CELLS, tmp_path, monkeypatch)
    assert values[1] == tmp_path / "runs" / "short" / "report.html"
    early = skyrl.load("runs/early")
    assert [record["step"] for record in early.metrics] == [0, 1, 2, 3]
    assert {0 <= sample["reward"] <= 1 for sample in early.samples()} == {True}
    assert get_at(early.config, "environment.env_class") == "__main__:starts_early"
    assert isinstance(values[3], str)
    last = values[4]
    assert isinstance(last, skyrl.Run) and last.status == "finished"


def test_the_page_lists_every_public_function_and_every_event() -> None:
    public = {name for name in skyrl.__all__ if name[0] != "_"} - {"Run", "Control", "TrainingState"}
    assert [name for name in public if f"| `skyrl.{name}" not in PAGE] == []
    assert [event for event in EVENTS if f"`{event}`" not in PAGE] == []
