"""Converts AReaL's settings one at a time by their tables, and reports the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from attrs import field, frozen

from skyrl.interop.areal.names import is_known, known_names
from skyrl.interop.conversions import Becomes, Entry
from skyrl.interop.report import Line
from skyrl.interop.writing import Writing, apply
from skyrl.tree.names import nearest

_UNKNOWN = "not known to this converter"
_LINES_WITH_SUGGESTIONS = 200
"""Largest number of report lines for which similar names are searched; experiments have fewer."""

_UNITS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda number: number,
    "epochs": lambda number: "1 epoch" if number == 1 else f"{number} epochs",
    "secs": lambda number: f"{number}s",
}


@frozen(kw_only=True)
class Tables:
    """Conversion tables of one kind of run."""

    keys: Mapping[str, Entry]
    """Key or pattern -> entry. An exact key takes precedence, then the first matching pattern."""

    patterns: tuple[str, ...] = field(init=False)
    """The keys that are patterns, in order."""

    copies: Mapping[str, str]
    """Settings that must equal another one, because there is a single field for both here."""

    originals: Mapping[str, Any] = field(factory=dict)
    """Defaults of settings that others copy, for files that leave them out."""

    follows: Mapping[str, str]
    """Settings that are copied from another one here if nothing else is written."""

    intervals: Mapping[str, str]
    """Prefix such as `saver.freq_`, which is followed by `epochs`, `steps` or `secs` -> our path."""

    @patterns.default
    def _(self) -> tuple[str, ...]:
        return tuple(key for key in self.keys if "*" in key or "[" in key)


def convert_setting(
    writing: Writing, tables: Tables, key: str, value: object, values: Mapping[str, Any], copy_of: str = ""
) -> None:
    """Write one setting, or record why not. `values` are all settings of the file; `copy_of` is the setting that the
    value refers to.
    """
    if _group_of(key, tables):
        _interval(writing, tables, key, value, values)
    elif tables.copies.get(key) in {**tables.originals, **values}:
        _copy(writing, tables.copies[key], key, value, {**tables.originals, **values})
    elif key in tables.follows and value == values.get(tables.follows[key]):
        apply(writing, key, value, Becomes(needless=f"same as {tables.follows[key]}, its default here"))
    else:
        _one(writing, tables, key, value, copy_of)


def _one(writing: Writing, tables: Tables, key: str, value: object, copy_of: str) -> None:
    entry = tables.keys.get(key)
    if entry is None:
        entry = next((tables.keys[each] for each in tables.patterns if fnmatchcase(key, each)), None)
    if entry is None:
        is_early = len(writing.lines) < _LINES_WITH_SUGGESTIONS
        writing.note(Line(outcome="refused", source=key, value=value, why=_why_unknown(key, suggest=is_early)))
        return
    become = Becomes(writes={entry: value}) if isinstance(entry, str) else entry(value)
    apply(writing, key, value, become, f"a copy of {copy_of}" if copy_of else "")


def _why_unknown(key: str, *, suggest: bool) -> str:
    if is_known(key):
        return "an AReaL setting that this converter does not convert"
    if not suggest:
        return _UNKNOWN
    beside = [name for name in known_names() if name.partition(".")[0] == key.partition(".")[0]]
    meant = nearest(key, beside or known_names())
    return _UNKNOWN + (f"; did you mean {meant}?" if meant else "")


def _copy(writing: Writing, original: str, key: str, value: object, values: Mapping[str, Any]) -> None:
    if value == values[original]:
        apply(writing, key, value, Becomes(needless=f"same as {original}; both are one setting here"))
    else:
        why = f"differs from {original} = {values[original]!r}, but both are one setting here"
        apply(writing, key, value, Becomes(refused=why))


def _group_of(key: str, tables: Tables) -> str:
    """The prefix of an interval key: `saver.freq_` for `saver.freq_steps`; empty for any other key."""
    start = key.removesuffix(key.rpartition("_")[2])
    return start if start in tables.intervals and key.removeprefix(start) in _UNITS else ""


def _interval(writing: Writing, tables: Tables, key: str, value: object, values: Mapping[str, Any]) -> None:
    """Convert the steps, epochs and seconds of one interval to one setting, in which each triggers independently, as in
    AReaL.
    """
    group = _group_of(key, tables)
    given = {unit: values[group + unit] for unit in _UNITS if values.get(group + unit) is not None}
    if value is None and given:
        apply(writing, key, value, Becomes(needless="not set"))
        return
    parts = [_UNITS[unit](number) for unit, number in given.items()]
    interval = -1 if not parts else parts[0] if len(parts) == 1 else parts
    apply(writing, key, value, Becomes(writes={tables.intervals[group]: interval}))
