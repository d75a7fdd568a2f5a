"""Prepares values for a tree: reads them from text, appends them to a list, puts them into a copy of an instance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree.classes import assembled, fields_of, is_config, table_class, validated
from skyrl.tree.freeform import refusal
from skyrl.tree.literals import is_bracketed
from skyrl.tree.origins import Assignment, Path
from skyrl.tree.plain import TypeMismatch
from skyrl.tree.table import Table
from skyrl.tree.types import coerce_exact, describe, item_kind, list_arm, parse


def with_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """A copy with these values, which were validated when assigned. Free-form tables, which may have changed since, and
    classes that validate their fields together are validated now. Raises ValueError.
    """
    cls = type(config)
    if hasattr(cls, "__attrs_post_init__") or not is_config(cls):
        return attrs.evolve(config, **changes)
    fields, judged_now, problems = fields_of(cls), {}, []
    for name in [name for name, value in changes.items() if type(value) is dict]:
        try:
            judged_now[name] = validated(fields[name], changes[name], config)
        except ValueError as error:
            problems += [attrs.evolve(each, path=each.path or name) for each in problems_of(error)]
    if problems:
        raise ConfigError(problems)
    return assembled(config, {**changes, **judged_now})


def class_of_table(attribute: attrs.Attribute[Any], value: object) -> type[Any] | None:
    """Class of a nested table, finished or under construction; None for a leaf."""
    return value.declared if isinstance(value, Table) else table_class(attribute, value)


def read(assignment: Assignment, kind: object) -> object:
    """The assigned value, read as the type `kind`. Raises `ConfigError` if it does not fit."""
    return parse(assignment.value, kind) if assignment.is_text else coerce_exact(assignment.value, kind)


def appended(attribute: attrs.Attribute[Any], current: object, assignment: Assignment) -> tuple[Any, ...]:
    """The current list with one more item, or with the items of another list."""
    kind = list_arm(attribute.type)
    if kind is None:
        raise refusal(f"+= works only on lists; this is {describe(attribute.type)}")
    before = () if current is None else current if isinstance(current, tuple) else (current,)
    text = assignment.value
    return (*before, *parse(text, kind)) if is_bracketed(text) else (*before, parse(text, item_kind(kind)))


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """Problems of a `ConfigError`; for any other exception of a validator, one problem with its message."""
    if isinstance(error, ConfigError):
        return error.problems
    message = str(error.args[0]) if error.args else type(error).__name__
    if isinstance(error, TypeMismatch):
        return (Problem(path="", message=message, hint=error.hint, code=error.code, value=error.value),)
    return (Problem(path="", message=message, hint=getattr(error, "hint", "")),)


def written_in(value: object, path: Path, default: object = None) -> Iterator[tuple[Path, Any]]:
    """Paths below `path`, with their values, of the leaves in which an instance differs from its class's defaults."""
    if not attrs.has(type(value)):
        return
    if type(default) is not type(value):
        default = type(value)()
    for name in fields_of(type(value)):
        ours, theirs = getattr(value, name), getattr(default, name)
        if attrs.has(type(ours)):
            yield from written_in(ours, (*path, name), theirs)
        elif ours != theirs:
            yield (*path, name), ours
