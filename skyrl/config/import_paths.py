"""Things of the user's own, by import path: `my_pkg.losses:MyLoss` from an importable module, `losses.py:MyLoss` from
a file.

Give it only names that stand in the user's own files or arguments. Nothing here is imported before a run asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError, UserError
from skyrl.tree.imports import import_module


def is_import_path(name: str) -> bool:
    """Does the name say where it is to be imported from?"""
    return ":" in name


def import_object(name: str, error: type[UserError] = UserError) -> Any:
    """What the import path names. Raises `error`, which says what was looked for and where."""
    where, _, attribute = name.rpartition(":")
    try:
        module = import_module(where)
    except ConfigError as failure:
        raise error(failure.problems[0].message) from failure
    if not hasattr(module, attribute):
        raise error(f"{where} has no {attribute!r}")
    return getattr(module, attribute)


class Imported:
    """An object of the user's own that can be sent to another process: it is imported anew there."""

    def __init__(self, name: str) -> None:
        """Raises `UserError`."""
        where, _, attribute = name.rpartition(":")
        self._name = f"{Path(where).expanduser().absolute()}:{attribute}" if where.endswith(".py") else name
        found = import_object(name)
        self.object = found() if isinstance(found, type) else found

    def __call__(self, *inputs: Any) -> Any:
        return self.object(*inputs)

    def __getattr__(self, name: str) -> Any:
        if name in ("object", "_name"):
            raise AttributeError(name)
        return getattr(self.object, name)

    def __reduce__(self) -> tuple[type[Imported], tuple[str]]:
        return Imported, (self._name,)
