"""Reads a configuration file of any format, and the files it extends, as assignments in order of precedence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree.names import nearest
from skyrl.tree.origins import Assignment, Origin
from skyrl.tree.plain import shown
from skyrl.tree.read_context import NOTHING, ReadContext
from skyrl.tree.text_files import UNREADABLE, cannot_read

EXTENDS = "extends"
"""Top-level key that names what the file extends: files, by path relative to this one, or `preset:NAME`."""

PRESET = "preset:"

MOST_LEVELS = 100
"""Longest chain of files that extend each other."""


def read_file(name: str, context: ReadContext = NOTHING) -> list[Assignment]:
    """Assignments to the root: first from what the file extends, then the file's own. `name` may also be a preset.

    A file that several others extend is applied once, where it first occurs. Raises `ConfigError`.
    """
    return _Reading(context).read(name)


class _Reading:
    """Reads one file and everything it extends."""

    def __init__(self, context: ReadContext) -> None:
        self._context = context
        self._done: set[str] = set()

    def read(self, name: str, above: tuple[str, ...] = ()) -> list[Assignment]:
        """The file's assignments, after those of the files it extends; `above` are the files that led here."""
        if name.startswith(PRESET):
            return [_preset(name, self._context)]
        assignment = _read(name)
        if not (isinstance(assignment.value, Mapping) and EXTENDS in assignment.value):
            return [assignment]
        if is_stored_form(assignment.value):
            place = assignment.origin.at(EXTENDS).place
            raise _refused(f"a stored configuration cannot have {EXTENDS}: this file was edited", place)
        own = {key: value for key, value in assignment.value.items() if key != EXTENDS}
        place = assignment.origin.at(EXTENDS).place
        found = [
            each
            for base in _bases(assignment.value[EXTENDS], place)
            for each in self._base(name, base, place, (*above, _identity(name)))
        ]
        return [*found, attrs.evolve(assignment, value=own)]

    def _base(self, name: str, base: str, place: str, chain: tuple[str, ...]) -> list[Assignment]:
        """Assignments of one file that `name` extends; empty if they were already included."""
        target = base if base.startswith(PRESET) else _beside(name, base)
        identity = target if base.startswith(PRESET) else _identity(target)
        if identity in chain:
            raise _refused(f"circular reference: {base} extends this file, directly or indirectly", place)
        if len(chain) > MOST_LEVELS:
            raise _refused(f"the chain of extended files is longer than {MOST_LEVELS}", place)
        if identity in self._done:
            return []
        try:
            found = self.read(target, chain)
        except ConfigError as error:
            raise _placed(error, place) from None
        self._done.add(identity)
        return found


def _bases(named: object, place: str) -> list[str]:
    """Files and presets that `extends` names, in order. Raises `ConfigError`."""
    bases = [named] if isinstance(named, str) else named if isinstance(named, list | tuple) else [None]
    if not all(isinstance(base, str) for base in bases):
        raise _refused(f"{shown(named)} is neither a file nor a list of files", place)
    return list(bases)


def is_stored_form(value: object) -> bool:
    """Is it a configuration as a run stores it, with its fingerprint, rather than one written by hand?"""
    return isinstance(value, Mapping) and {"config", "fingerprint"} <= value.keys()


def _read(name: str) -> Assignment:
    match FilePath(name).suffix.lower():
        case ".yaml" | ".yml":
            from skyrl.tree.yaml_file import read_yaml

            return read_yaml(name)
        case ".json":
            from skyrl.tree.json_file import read_json

            return read_json(name)
        case _:
            from skyrl.tree.toml_file import read_toml

            return read_toml(name)


def _preset(name: str, context: ReadContext) -> Assignment:
    wanted = name.removeprefix(PRESET)
    if wanted not in context.presets:
        meant = nearest(wanted, tuple(context.presets))
        hint = f"did you mean {PRESET}{meant}?" if meant else f"presets: {', '.join(context.presets) or 'none'}"
        problem = Problem(path=name, message="no such preset", hint=hint)
        raise ConfigError([problem], title=UNREADABLE)
    return Assignment(path=(), value=context.presets[wanted], origin=Origin(kind="preset", where=wanted))


def _beside(name: str, other: str) -> str:
    """The path `other` resolved relative to the folder of the file `name`."""
    path = FilePath(other)
    if path.is_absolute() or other.startswith("~"):
        return other
    folder = FilePath(name).parent
    return str(folder / path)


def _identity(name: str) -> str:
    try:
        return str(FilePath(name).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise cannot_read(name, str(error)) from None


def _refused(message: str, place: str) -> ConfigError:
    return ConfigError([Problem(path=EXTENDS, message=message, place=place)], title=UNREADABLE)


def _placed(error: ConfigError, place: str) -> ConfigError:
    """The error with `place` filled in for problems that have none, such as a missing file."""
    problems: list[Any] = [attrs.evolve(each, place=each.place or place) for each in error.problems]
    return ConfigError(problems, title=error.title)
