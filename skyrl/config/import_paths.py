"""Losses, estimators and the like of the user's own: named by import path, built from the settings beside the name.

    policy_loss_type = "losses.py:MyLoss"        policy_loss.margin = 0.1

What an import path is, and what it imports, is in `skyrl.tree.imports`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError, Problem, UserError
from skyrl.tree import thaw
from skyrl.tree.classes import fields_of, is_config
from skyrl.tree.draft import structure

_SPELLING = "module:name or file.py:name, of a class or a function"


def is_import_path(name: str) -> bool:
    """Does the name say where it is to be imported from?"""
    return ":" in name


def absolute(name: str) -> str:
    """The same import path, good from any folder."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).expanduser().absolute()}:{attribute}" if where.endswith(".py") else name


def build(name: str, settings: Mapping[str, Any], *, field: str, table: str) -> Any:
    """The object that import path `name` stands for: an instance of a class, made from `settings`, or a function.

    `field` and `table` are the dotted paths that name and settings are written at. Raises `ConfigError` for what cannot
    be imported or called, and for every setting that the class has not, or does not take.
    """
    from skyrl.tree.imports import import_object  # few runs have any

    try:
        found = import_object(name)
    except UserError as error:
        raise ConfigError([Problem(path=field, message=str(error), hint=_SPELLING)]) from error
    if not callable(found):
        raise ConfigError([Problem(path=field, message=f"{name} is not a class or function", hint=_SPELLING)])
    if is_config(found):
        return _instance(found, settings, table)
    if settings:
        hint = "make it a class, decorated with skyrl.tree.frozen, whose fields are the settings"
        raise ConfigError([Problem(path=table, message=f"{name} takes no settings", hint=hint)])
    return found() if isinstance(found, type) else found


def _instance(cls: type[Any], settings: Mapping[str, Any], table: str) -> Any:
    try:
        return structure(thaw(settings), cls)
    except ConfigError as error:
        from skyrl.tree.docs import docs_of  # only to say what is wrong

        docs = docs_of(cls)
        raise ConfigError(
            [
                Problem(
                    path=f"{table}.{each.path}",
                    message=each.message,
                    hint=each.hint or docs.get(each.path, "") or f"its fields: {', '.join(fields_of(cls))}",
                )
                for each in error.problems
            ]
        ) from error


class Imported:
    """An object of the user's own that can be sent to another process: it is built anew there, from its import path."""

    def __init__(self, name: str, settings: Mapping[str, Any], *, field: str, table: str) -> None:
        """As `build`."""
        self._recipe = (absolute(name), settings, field, table)
        self.object = build(name, settings, field=field, table=table)

    def __call__(self, *inputs: Any) -> Any:
        return self.object(*inputs)

    def __getattr__(self, name: str) -> Any:
        if name in ("object", "_recipe"):
            raise AttributeError(name)
        return getattr(self.object, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self._recipe


def _again(name: str, settings: Mapping[str, Any], field: str, table: str) -> Imported:
    return Imported(name, settings, field=field, table=table)
