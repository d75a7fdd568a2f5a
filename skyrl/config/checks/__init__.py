"""Checks of resolved runs: functions from a run to its problems, in a module for each part of a run.

What must hold is a check's name and docstring. Each module ends with `checks_in(__name__)`, all that it defines, and
`loading/kinds.py` puts them together.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl.config.foundation.entry import RunConfig
    from skyrl.tree.rules import Check


def checks_in(module: str) -> tuple[Check[RunConfig], ...]:
    """The checks that a module has defined so far, in order: its public functions from `run` alone to problems."""
    return tuple(
        value
        for name, value in vars(sys.modules[module]).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module
        and not name.startswith("_")
        and [*value.__annotations__] == ["run", "return"]
        and value.__annotations__["return"] == "Iterator[Problem]"
    )
