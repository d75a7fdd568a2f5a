"""The user's own losses, estimators and the like: named by import path, built from the settings beside the name.

    policy_loss_type = "losses.py:MyLoss"        policy_loss.margin = 0.1

What an import path is, and what it imports, is in `skyrl.tree.imports`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from skyrl.config.foundation.reasoning_tasks import REASONING_GYM
from skyrl.tree.imports import import_object


def load_builtin(path: str) -> Any:
    """The object of this package that a table of facts names as "module:name": the tables import nothing above them."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def is_import_path(name: str) -> bool:
    """Whether the name is an import path: `reasoning_gym:chain_sum` is a task of that package."""
    return ":" in name and not name.startswith(f"{REASONING_GYM}:")


def absolute(name: str) -> str:
    """The import path in a form that is valid from any folder."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).expanduser().absolute()}:{attribute}" if where.endswith(".py") else name


class Imported:
    """A user's own object that can be sent to another process, which imports it again."""

    def __init__(self, name: str) -> None:
        """Raises `UserError`."""
        self._name = absolute(name)
        target = import_object(name)
        self.object = target() if isinstance(target, type) else target

    def __call__(self, *inputs: object, **named: object) -> Any:
        return self.object(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name in ("object", "_name"):
            raise AttributeError(name)
        return getattr(self.object, name)

    def __reduce__(self) -> tuple[type[Imported], tuple[str]]:
        return Imported, (self._name,)
