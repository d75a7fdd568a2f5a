"""Checks of resolved runs: functions from a run to its problems, in a module for each part of a run.

What must hold is a check's name and docstring. `loading/kinds.py` lists the modules whose checks a kind of run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from skyrl.errors import Problem
from skyrl.tree.rules import Check


def checks_in(*modules: ModuleType) -> tuple[Check[Any], ...]:
    """The checks of the modules, in order: their public functions from `run` alone to problems."""
    return tuple(check for module in modules for check in functions_in(module, "run"))


def functions_in(module: ModuleType, *arguments: str) -> tuple[Callable[..., Iterator[Problem]], ...]:
    """The public functions that a module defines from these arguments to problems, in order."""
    return tuple(
        value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and [*value.__annotations__] == [*arguments, "return"]
        and value.__annotations__["return"] == "Iterator[Problem]"
    )


def warning(path: str, message: str, hint: str = "") -> Problem:
    """A problem that stops no run, except under `--strict`."""
    return Problem(path=path, message=message, hint=hint, severity="warning")
