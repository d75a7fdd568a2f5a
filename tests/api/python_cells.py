"""Runs code as the cells of a notebook run: one after the other, in the module `__main__` of their own."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from tests.nano_run import overrides
from tests.supervised_run import toml_file


def run_cells(cells: Iterable[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The value of the last line of each cell, None where it is no expression. They run in `folder`."""
    program = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.chdir(folder)
    values: list[object] = []
    for number, source in enumerate(cells):
        file = f"<cell {number}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        *body, last = ast.parse(source).body
        expression = last if isinstance(last, ast.Expr) else None
        exec(compile(ast.Module(body if expression else [*body, last], []), file, "exec"), vars(program))
        values.append(
            eval(compile(ast.Expression(expression.value), file, "eval"), vars(program)) if expression else None
        )
    return values


def write_run(nano: Path, folder: Path) -> None:
    """`run.toml` of the nano model, with checkpoints."""
    settings = overrides(nano, folder, trainer__eval_interval=-1)
    own = ("trainer.run_path", "trainer.ckpt_path", "trainer.export_path")
    toml_file(folder / "run.toml", {path: value for path, value in settings.items() if path not in own})
