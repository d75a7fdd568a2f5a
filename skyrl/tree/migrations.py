"""Old names of paths and their replacements. Applied to assignments, so that origins are preserved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from skyrl.errors import ConfigError, Problem, ProblemCode
from skyrl.tree.origins import Assignment, Path, dotted
from skyrl.tree.types import display_value, parse


@frozen(kw_only=True)
class Migration:
    """One old path, or every path inside an old table.

    Example: `Migration(old="generator.backend", new="generator.inference_engine.backend", since="March 2026")`
    """

    old: str
    new: str | None = None
    """Path of the value today. None: removed, for the reason in `reason`."""

    since: str = ""
    """When the old name was retired, in words."""

    reason: str = ""
    """Reason of the removal, or a replacement."""

    convert: Callable[[Any], Any] | None = None
    """Converts the value under the old name to the value under the new one."""

    harmless: tuple[Any, ...] = ()
    """Old values that match today's fixed behaviour: they are dropped with a warning instead of refused."""

    is_later: bool = False
    """Whether another system has the field, and this version does not implement it."""

    needless: bool = False
    """Whether every value may be dropped with a warning, for the reason in `reason`."""


Followed = tuple[tuple[Assignment, ...], tuple[Problem, ...]]
"""An assignment under its current name, with warnings about the old one."""


def follow(migrations: Sequence[Migration], assignment: Assignment) -> Followed | None:
    """An assignment to an old name, translated to the current one; None if the name is not an old one.

    Raises `ConfigError` for a removed name, unless its value matches today's fixed behaviour.
    """
    migration = _innermost(migrations, assignment.path)
    if migration is None:
        return None
    is_whole = dotted(assignment.path) == migration.old and isinstance(assignment.value, Mapping)
    if is_whole and any(entry.old.startswith(f"{migration.old}.") for entry in migrations):  # entries for keys in it
        inside = (assignment.inside(str(key), value) for key, value in assignment.value.items())
        return tuple(inside), ()
    since, value = f" (since {migration.since})" if migration.since else "", assignment.value
    if (migration.convert or migration.harmless) and assignment.is_text:
        value = parse(value, Any)
    if migration.needless:
        return (), (_warning(assignment, f"ignored: no such field{since}", migration.reason),)
    if any(type(value) is type(item) and value == item for item in migration.harmless):
        message = f"ignored: no such field{since}, and {display_value(value)} would change nothing"
        return (), (_warning(assignment, message, migration.reason),)
    if (target := current_path(migrations, assignment.path)) is not None:
        moved = evolve(assignment, path=target)
        if migration.convert:
            moved = evolve(moved, value=migration.convert(value), is_text=False)
        warning = _warning(assignment, f"is called {dotted(target)} in skyrl{since}", migration.reason)
        return (moved,), (warning,)
    code: ProblemCode = "not implemented" if migration.is_later else "removed field"
    raise ConfigError([Problem(path="", message=f"no such field{since}", hint=migration.reason, code=code)])


def current_path(migrations: Iterable[Migration], path: Path) -> Path | None:
    """Today's name of a path that was renamed; None for any other."""
    migration = _innermost(migrations, path)
    if migration is None or migration.new is None:
        return None
    return (*_split(migration.new), *path[len(_split(migration.old)) :])


def _innermost(migrations: Iterable[Migration], path: Path) -> Migration | None:
    """The entry for the path, or for the innermost table around it."""
    matches = [migration for migration in migrations if path[: len(_split(migration.old))] == _split(migration.old)]
    return max(matches, key=lambda migration: len(migration.old), default=None)


def _warning(assignment: Assignment, message: str, hint: str) -> Problem:
    path, location = dotted(assignment.path), assignment.origin.location
    return Problem(path=path, message=message, hint=hint, location=location, severity="warning")


def _split(path: str) -> Path:
    return tuple(path.split("."))
