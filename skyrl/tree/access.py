"""Reading and replacing one value of a frozen tree by its dotted path."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree.classes import fields_of
from skyrl.tree.types import config_class

T = TypeVar("T")


def get_at(config: Any, path: str) -> Any:
    """The value at a dotted path; None where a table on the way is None. Raises AttributeError for an unknown name."""
    for name in path.split("."):
        if config is None:
            return None
        config = getattr(config, name)
    return config


def evolve_at(config: T, path: str, value: Any) -> T:
    """A new tree with one value replaced; converters and validators run, and untouched branches are shared.

    A table on the way that is None starts out from the defaults of its class.
    """
    name, _, rest = path.partition(".")
    if rest:
        table = getattr(config, name)
        nested = config_class(fields_of(type(config))[name].type)
        value = evolve_at(nested() if table is None and nested else table, rest, value)
    evolved: T = attrs.evolve(cast(Any, config), **{name: value})
    return evolved


def required(value: T | None, path: str) -> T:
    """`value`, which derivation must have filled: so a component asks at its door. Raises `ConfigError` on None."""
    if value is None:
        message = "is not set, and this component was built without resolve()"
        raise ConfigError([Problem(path=path, message=message, hint="call resolve(config) first, or give the value")])
    return value
