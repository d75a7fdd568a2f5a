"""Old names: what a path was called before, and what became of it. Applied to assignments, so that origins survive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attrs import frozen

from skyrl.tree.origins import Path


@frozen(kw_only=True)
class Migration:
    """One old path, or every path inside an old table.

    Example: `Migration(old="generator.backend", new="generator.inference_engine.backend", since="March 2026")`
    """

    old: str
    new: str | None = None
    """Where the value goes. None: nowhere, for the reason in `why`."""

    since: str = ""
    """When the old name went out of use, in words."""

    why: str = ""
    """What a person needs to know: why it is gone, or what else to do."""

    convert: Callable[[Any], Any] | None = None
    """The value under the new name, from the one under the old."""

    harmless: tuple[Any, ...] = ()
    """Old values that ask for what happens anyway: such a one is dropped with a warning instead of refused."""


def find_migration(migrations: Iterable[Migration], path: Path) -> Migration | None:
    """The entry for the path, or for the innermost table around it."""
    found = [each for each in migrations if path[: len(_split(each.old))] == _split(each.old)]
    return max(found, key=lambda each: len(each.old), default=None)


def moved(migration: Migration, path: Path) -> Path:
    """The path under its new name."""
    return (*_split(migration.new or ""), *path[len(_split(migration.old)) :])


def _split(path: str) -> Path:
    return tuple(path.split("."))
