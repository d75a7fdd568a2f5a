"""An exception of user code is reported with the line that raised it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl.envs.coroutines import awaited
from skyrl.errors import TaskError
from skyrl.processes.calls import summary
from skyrl.tree.frames import defined_at, described, raised_at
from skyrl.tree.imports import import_object

SOURCE = """\
import json, math
def scored(answer):
    return parsed(answer)["score"]
def parsed(answer):
    return json.loads(answer)
async def awaited(answer):
    return parsed(answer)
def rooted(answer):
    return math.sqrt(-1)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[str], object]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frames_task.py").write_text(SOURCE, encoding="utf-8")
    return lambda name: import_object(f"frames_task.py:{name}")


def raised_by(function: Callable[[str], object]) -> BaseException:
    with pytest.raises((ValueError, KeyError)) as caught:
        awaited(function("{"))
    return caught.value


@pytest.mark.parametrize(("name", "line"), [("scored", 5), ("awaited", 5), ("rooted", 9)])
def test_the_innermost_line_of_the_users_own_is_named_and_none_of_a_library(
    name: str, line: int, task: Callable[[str], Callable[[str], object]]
) -> None:
    error = raised_by(task(name))
    inside = "rooted" if name == "rooted" else "parsed"
    assert raised_at(error) == f"frames_task.py:{line}, in {inside}"
    assert described(error).endswith(f"(frames_task.py:{line}, in {inside})")
    assert summary(error).endswith(f"(frames_task.py:{line}, in {inside})")


def test_an_exception_without_user_code_has_no_place() -> None:
    assert raised_at(ValueError("never raised")) == ""
    assert described(ValueError("never raised")) == "ValueError: never raised"
    assert defined_at(math.sqrt) == ""
    assert defined_at(asyncio.run) != ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import json\nimport no_such_module_here\n",
            r"^imperr\.py:2 imports the module no_such_module_here, which is neither installed nor in the working "
            r"directory: install it, or put it there$",
        ),
        ("def f(:\n", r"importing .*imperr\.py failed: SyntaxError: .*imperr\.py:1"),
        ("x = 1\n1 / 0\n", r"ZeroDivisionError: division by zero \(imperr\.py:2, in <module>\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imperr.py").write_text(text, encoding="utf-8")
    with pytest.raises(TaskError, match=message):
        import_object("imperr.py:f", TaskError)
