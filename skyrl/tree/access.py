"""Reading and replacing one value of a frozen tree by its dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import attrs

from skyrl.errors import ConfigError, Problem, UnknownFieldError
from skyrl.tree.classes import (
    assembled,
    fields_of,
    is_config,
    unknown_field,
    unmark_written,
    validated,
    written_fields,
)
from skyrl.tree.types import TypeMismatch, config_class

T = TypeVar("T")


def get_at(config: object, path: str) -> Any:
    """The value at a dotted path; None where a table on the way is None, or a free table has no such entry. The empty
    path is that of the tree. Raises AttributeError for an unknown name.
    """
    for name in path.split(".") if path else ():
        if config is None:
            return None
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name)
    return config


def default_at(cls: type[Any], path: str) -> Any:
    """The default of the field at a dotted path, also inside a table that is null by default."""
    *tables, name = path.split(".")
    instance: Any = cls()
    for table in tables:
        inner, nested = getattr(instance, table), config_class(fields_of(type(instance))[table].type)
        instance = nested() if inner is None and nested else inner
    return getattr(instance, name)


def evolve_at(config: T, path: str, value: object) -> T:
    """A new tree with one value replaced; converters and validators run, and untouched branches are shared.

    A table on the way that is None starts out from the defaults of its class. Raises `ConfigError` for a value that
    does not fit, and `UnknownFieldError` for a path that names no field.
    """
    name, _, rest = path.partition(".")
    if isinstance(config, Mapping):
        return cast(T, {**config, name: evolve_at(config.get(name, {}), rest, value) if rest else value})
    fields = fields_of(type(config)) if attrs.has(type(config)) else {}
    if name not in fields:
        raise UnknownFieldError([unknown_field(name, fields)], title=f"{type(config).__name__} cannot be changed")
    if rest:
        table, nested = getattr(config, name), config_class(fields[name].type)
        value = evolve_at(nested() if table is None and nested else table, rest, value)
    if not is_config(type(config)) or hasattr(config, "__attrs_post_init__"):  # it validates its fields together
        evolved: T = attrs.evolve(cast(Any, config), **{name: value})
        return evolved
    try:
        stored = validated(fields[name], value, config)  # the other fields already were
    except TypeMismatch as misfit:
        problem = Problem(path=name, message=str(misfit), hint=misfit.hint)
        raise ConfigError([problem], title=f"{type(config).__name__} cannot be built") from None
    return assembled(config, {name: stored})


def is_written(config: object, path: str) -> bool:
    """Did somebody write the value at a dotted path of a tree that `load` returned?"""
    *tables, name = path.split(".")
    for table in tables:
        config = getattr(config, table, None)
    return name in (written_fields(config) or ())


def mark_derived(config: T, path: str) -> T:
    """A tree that no longer says that the value at a dotted path was written."""
    parent, _, name = path.rpartition(".")
    table = get_at(config, parent) if parent else config
    return evolve_at(config, parent, unmark_written(table, name)) if parent else unmark_written(table, name)


def required(value: T | None, path: str) -> T:
    """`value`, which derivation must have filled. Components call it on entry. Raises `ConfigError` on None."""
    if value is None:
        message = "is not set, and this component was built without resolve()"
        raise ConfigError([Problem(path=path, message=message, hint="call resolve(config) first, or set the value")])
    return value


def joined(path: str, field: str) -> str:
    """The dotted path of a field below `path`, which is empty for the whole tree."""
    return f"{path}.{field}" if path else field
