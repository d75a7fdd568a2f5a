"""Converts the settings of a foreign system by its tables: one path, or one function, for each of its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from attrs import evolve, field, frozen

from skyrl.interop.conversions import Becomes, Entry
from skyrl.interop.environment import read_environment
from skyrl.interop.report import Conversion
from skyrl.interop.writing import Writing, apply

Values = Mapping[str, Any]
Together = Callable[[str, Any, Values], Becomes]
"""Conversion of a setting that depends on others: its key, its value, all settings."""


@frozen
class Computed:
    """A value that only the foreign program itself can compute."""

    text: str
    """The expression as written in the program, or a description of it."""

    why: str = "computed by the program: replace it with its value"
    """Why there is no value, and what to do."""


@frozen(kw_only=True)
class System:
    """The tables of one system."""

    name: str
    """The system and version of the tables, for messages."""

    keys: Mapping[str, Entry]
    """Settings that convert independently. Keys may be patterns, of which the first that matches is used."""

    together: Mapping[str, Together]
    """Settings, or patterns of them, whose meaning depends on others. They take precedence over `keys`."""

    defaults: Callable[[Values], Mapping[str, Any]]
    """Settings that a file omits and that change what is learned, with the system's defaults."""

    implied: Callable[[Values], Mapping[str, Any]]
    """Paths of ours that follow from several settings together, and their values."""

    remarks: Callable[[Values], tuple[str, ...]]
    """Remarks on what the system defines outside of its files."""

    _patterns: tuple[str, ...] = field(init=False)

    @_patterns.default
    def _(self) -> tuple[str, ...]:
        return tuple(key for key in (*self.together, *self.keys) if "*" in key)

    def becomes(self, key: str, value: object, values: Values) -> Becomes:
        """The outcome of one setting."""
        found = key if key in self.together or key in self.keys else self._pattern(key)
        if found in self.together:
            return self.together[found](key, value, values)
        entry = self.keys.get(found)
        if entry is None:
            return Becomes(refused=f"not known to this converter, which covers the settings of {self.name}")
        return Becomes(writes={entry: value}) if isinstance(entry, str) else entry(value)

    def _pattern(self, key: str) -> str:
        return next((each for each in self._patterns if fnmatchcase(key, each)), "")


def convert_settings(system: System, given: Values, where: str) -> Conversion:
    """Convert the flat settings of a file to our tables."""
    writing, silent = Writing(where), system.defaults(given)
    values = {**silent, **given}
    for key, value in {**given, **silent}.items():
        apply(writing, key, shown(value), _outcome(system, key, value, values))
    for path, value in system.implied(values).items():
        writing.write("implied", path, value)
    converted = writing.finish()
    lines = tuple(line for line in converted.lines if line.source in given)
    defaults = tuple(line for line in converted.lines if line.source not in given and line.targets)
    return evolve(converted, lines=lines, defaults=defaults, remarks=system.remarks(given))


def _outcome(system: System, key: str, value: Any, values: Values) -> Becomes:
    if computed := next((each for each in (value if isinstance(value, list) else [value]) if _is_computed(each)), None):
        return Becomes(refused=computed.why)
    read = read_environment(value, key)
    return Becomes(refused=read.refused) if read.refused else system.becomes(key, read.value, values)


def _is_computed(value: object) -> bool:
    return isinstance(value, Computed)


def shown(value: object) -> Any:
    """A value for the report; expressions are shown by their text."""
    if isinstance(value, list):
        return [shown(each) for each in value]
    return value.text if isinstance(value, Computed) else value


def off(value: object) -> bool:
    """Whether a setting is off: null, false, 0, or empty."""
    return value in (None, False, 0, "", "null", "None") or value == [] or value == {}


def needless(why: str) -> Becomes:
    """Outcome of a setting for which nothing has to be written."""
    return Becomes(needless=why)


def whole(value: object, *, default: int = 1) -> int:
    """The count in the file if it is a whole number, else `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default
