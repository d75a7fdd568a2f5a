"""Converts the settings of one system by its tables: a path of ours, or a function, for each of its settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from attrs import evolve, field, frozen

from skyrl.config.loading.check import has_effect
from skyrl.interop.report import Conversion, OtherDefault
from skyrl.interop.translation import (
    Dependent,
    Entry,
    Translation,
    UnexpectedValue,
    Values,
    is_off,
    redundant,
    refused,
    translate,
)
from skyrl.interop.values import Read, read_environment
from skyrl.interop.writing import Writing, apply
from skyrl.tree import get_at
from skyrl.tree.types import display_value


@frozen
class Switch:
    """A setting of another system that turns a feature on, and the settings that only this feature reads."""

    key: str
    """Key of the setting. `*.` at its beginning stands for the table in which `settings` are found."""

    settings: tuple[str, ...]
    """Patterns of the settings that the feature reads. Each begins with `*.` if `key` does."""

    source: str
    """File and line of the other system where the feature is left out."""

    default: Any = False
    """Value of the switch in a file that omits it."""

    is_off: Callable[[Any], bool] = is_off
    """Whether a value turns the feature off."""

    def key_for(self, setting: str) -> str:
        """Key of the switch of a setting; empty if the setting is not one of this feature."""
        if not any(fnmatchcase(setting, pattern) for pattern in self.settings):
            return ""
        if not self.key.startswith("*."):
            return "" if setting == self.key else self.key
        heads = (setting.split(pattern.strip("*"), 1)[0] for pattern in self.settings if fnmatchcase(setting, pattern))
        key = next(heads) + self.key.removeprefix("*")
        return "" if setting == key else key


def other_than(*active: object) -> Callable[[object], bool]:
    """For a switch that is off unless it has one of the values `active`."""
    return lambda value: value not in active


def why_idle(setting: str, values: Values, switches: Iterable[Switch]) -> str:
    """Why a setting has no effect beside the others, `values`; empty if no switch is off."""
    for switch in switches:
        key = switch.key_for(setting)
        value = values.get(key, switch.default)
        if key and switch.is_off(value):
            if is_off(value):
                return f"only read with {key}, which is off"
            return f"not read with {key} = {display_value(value)}"
    return ""


T = TypeVar("T")


@frozen
class ProgramValue:
    """A value that only the foreign program itself can compute."""

    text: str
    """The expression as written in the program, or a description of it."""

    reason: str = "computed by the program: replace it with its value"
    """Why there is no value, and what to do."""


def read_setting(key: str, value: Any, values: Values) -> Read:
    """The value of a setting, with references to the environment in our form, unless only its program can compute it
    or an item of it.
    """
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, ProgramValue):
            return Read(value, item.reason)
    return read_environment(value, key)


@frozen(kw_only=True)
class System:
    """The tables of one system. Keys of a table may be patterns; an exact key comes before them, and the first
    pattern that matches is used.
    """

    keys: Mapping[str, Entry]
    """Settings that translate independently."""

    dependent: tuple[Mapping[str, Dependent], ...]
    """Settings whose meaning depends on others. These tables come before `keys`, in order."""

    switches: tuple[Switch, ...] = ()
    """Settings that turn features on. Below one that is off, a setting of any value needs nothing."""

    unknown: Callable[[str, Writing], str]
    """Why a setting in no table is refused."""

    defaults: Callable[[Values], Values] = lambda values: {}
    """Settings that a file omits and that change what is learned, with the system's defaults."""

    reports_defaults: bool = False
    """Whether a default that is refused is reported as if the file had it."""

    implied: Callable[[Values], Iterable[tuple[str, str, Any]]] = lambda values: ()
    """(name in messages, path of ours, value) of what follows from several settings together."""

    other_defaults: Callable[[Values, Any], Iterable[OtherDefault]] = lambda values, run: ()
    """Settings that a file omits and whose default differs in the finished run."""

    read: Callable[[str, Any, Values], Read] = read_setting
    """The value of a setting in our form, or why it cannot be used."""

    _patterns: tuple[tuple[str, ...], ...] = field(init=False)

    @_patterns.default
    def _(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(key for key in table if "*" in key) for table in (*self.dependent, self.keys))

    def translated(self, key: str, value: object, values: Values, copy_of: str = "") -> Translation | None:
        """The outcome of one setting, which may be a copy of another one; None for an unknown setting."""
        try:
            translation = self._translate(key, value, values)
        except UnexpectedValue as error:
            return refused(str(error))
        return evolve(translation, note=f"a copy of {copy_of}") if translation and copy_of else translation

    def _translate(self, key: str, value: object, values: Values) -> Translation | None:
        if reason := why_idle(key, values, self.switches):
            return redundant(reason)
        *patterns, independent = self._patterns
        for table, table_patterns in zip(self.dependent, patterns, strict=True):
            for convert in _entries(table, table_patterns, key):
                if translation := convert(key, value, values):
                    return translation
        entry = next(_entries(self.keys, independent, key), None)
        return None if entry is None else translate(entry, value)


def _entries(table: Mapping[str, T], patterns: tuple[str, ...], key: str) -> Iterator[T]:
    if key in table:
        yield table[key]
    yield from (table[pattern] for pattern in patterns if fnmatchcase(key, pattern))


def convert_settings(
    system: System, settings: Values, writing: Writing, copies: Mapping[str, str] | None = None
) -> Conversion:
    """Convert the flat settings of a file to our tables. `copies` maps each copied setting to its original."""
    omitted = system.defaults(settings)
    values = {**omitted, **settings}
    for key, value in {**settings, **omitted}.items():
        read = system.read(key, value, values)
        translation = refused(read.refused) if read.refused else None
        if translation is None:
            translation = system.translated(key, read.value, values, (copies or {}).get(key, ""))
        apply(writing, key, _display_value(value), translation or refused(system.unknown(key, writing)))
    for name, path, value in system.implied(values):
        writing.write(name, path, value)
    converted = writing.finish(lambda run: tuple(system.other_defaults(settings, run)))
    return evolve(
        converted,
        lines=tuple(
            line for line in converted.lines if line.source in settings or (system.reports_defaults and line.is_refused)
        ),
        defaults=tuple(line for line in converted.lines if line.source not in settings and line.targets),
    )


def other_folder(
    setting: str, default: str, path: str, *, model: str
) -> Callable[[Values, Any], Iterator[OtherDefault]]:
    """For `System.other_defaults`: the folder `default` of a `setting` that a complete run omits, in which
    `{NAME=VALUE}` is the setting NAME with its default; `path` is ours, and `model` the setting that only complete runs
    have.
    """

    def omitted(values: Values, run: Any) -> Iterator[OtherDefault]:
        if model in values and setting not in values and has_effect(run, path):
            folder = re.sub(
                r"{([^={}]+)=([^={}]+)}", lambda name: str(_display_value(values.get(name[1], name[2]))), default
            )
            yield OtherDefault(source=setting, source_default=folder, path=path, skyrl_default=get_at(run, path))

    return omitted


def _display_value(value: object) -> Any:
    """A value for the report; expressions are shown by their text."""
    if isinstance(value, list):
        return [_display_value(item) for item in value]
    return value.text if isinstance(value, ProgramValue) else value
