"""Converts files of other systems to layers of our tree, and reports the outcome of every line. Nothing is started.

Read `report.py` first (the result of a conversion), then `translation.py` (one setting), `systems.py` (a whole file by
the tables of its system), and a system, such as `verl/convert.py`.
"""

from __future__ import annotations

from skyrl.errors import ConfigError, Problem


def not_converted(path: str, message: str, hint: str = "", choices: tuple[Problem, ...] = ()) -> ConfigError:
    """The error for a file of which nothing is converted. `choices` are what the user may name, one problem each."""
    return ConfigError([Problem(path=path, message=message, hint=hint), *choices], title="Nothing was converted")
