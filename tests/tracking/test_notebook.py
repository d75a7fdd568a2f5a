"""Progress in a notebook, with a stand-in for IPython."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from skyrl.tracking.console import Console
from skyrl.tracking.tracker import TrackedRun

RUN = TrackedRun(project="p", name="r", folder=Path("run"), total_steps=4, first_step=0)


class Cell:
    """The outputs of a cell, each a list of what it has shown, the last of which is seen."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def display(self, html: str, display_id: bool) -> SimpleNamespace:
        assert display_id
        output = [html]
        self.outputs.append(output)
        return SimpleNamespace(update=output.append)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The kernel of a notebook."""
    cell, ipython, inner = Cell(), ModuleType("IPython"), ModuleType("IPython.display")
    parts: dict[Any, Any] = {ipython: {"get_ipython": lambda: SimpleNamespace(kernel=object())}}
    parts[inner] = {"HTML": str, "display": cell.display}
    for module, values in parts.items():
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return cell


def test_one_output_is_replaced_and_evaluations_stay(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.of_run(RUN)
    console.log(0, {"eval/all/avg_score": 0.25})
    console.log(1, {"reward/avg_raw_reward": 0.5})
    console.log(2, {"reward/avg_raw_reward": 0.75, "eval/all/avg_score": 0.5})
    console.log(3, {"reward/avg_raw_reward": 0.875})
    console.close()
    [output] = cell.outputs
    assert [html.partition("max")[0] for html in output] == [f'<progress value="{step}" ' for step in range(4)]
    assert ["0.250" in output[3], "0.500" in output[3], "reward 0.750" in output[3]] == [True, True, True]
    assert "reward 0.500" not in output[3] and "reward 0.875" in output[3]
    assert capsys.readouterr() == ("", "")


def test_a_shell_of_ipython_in_a_terminal_gets_lines(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    Console.of_run(RUN).log(1, {"reward/avg_raw_reward": 0.5})
    assert capsys.readouterr().err.startswith("step 1/4  reward 0.500")
    assert cell.outputs == []
