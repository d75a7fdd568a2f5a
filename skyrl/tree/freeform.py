"""Writes into free-form tables, which are plain dictionaries and lists during construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from skyrl.errors import ConfigError, Problem
from skyrl.tree.frozen import thaw
from skyrl.tree.origins import Path


def enter(holder: dict[str, Any], names: Path) -> Any:
    """The table or list into which the last of `names` is written; missing tables are created.

    A list is entered if the next name is an index; if it is a key, a table replaces the list.
    """
    inner: Any = holder
    for name, following in pairwise(names):
        if isinstance(inner, list):
            raise refusal(f"values inside list item {name} cannot be set", hint="write the whole list as one value")
        child = inner.get(name)
        if isinstance(child, dict) or (isinstance(child, list) and _is_index(following)):
            inner = child
        else:
            inner[name] = inner = {}
    return inner


def make_way(holder: dict[str, Any], names: Path) -> None:
    """Replace a list at `names` by a table, because the keys about to be written there are not indices."""
    inner = enter(holder, names)
    if isinstance(inner, dict) and isinstance(inner.get(names[-1]), list):
        inner[names[-1]] = {}


def forget(holder: dict[str, Any], names: Path, default: object) -> None:
    """Reset the value at `names` to the default table's, or remove it if the default has none."""
    for name in names[:-1]:
        holder = holder.get(name, {}) if isinstance(holder, dict) else {}
        default = default.get(name) if isinstance(default, Mapping) else None
    if isinstance(default, Mapping) and names[-1] in default:
        holder[names[-1]] = thaw(default[names[-1]])
    elif isinstance(holder, dict):
        holder.pop(names[-1], None)


def append(holder: dict[str, Any], name: str, value: object) -> None:
    """Add an item, or the items of a list, to the list under `name`, which is created if missing."""
    current = holder.get(name, [])
    if not isinstance(current, list):
        raise refusal("is not a list, so nothing can be appended to it")
    holder[name] = [*current, *(thaw(value) if isinstance(value, list | tuple) else [thaw(value)])]


def position(name: str, items: Sequence[object]) -> int:
    """The index of an existing item. Raises `ConfigError` if there is no such item."""
    if _is_index(name) and int(name) < len(items):
        return int(name)
    there = f"0 to {len(items) - 1}" if items else "none"
    raise refusal(f"there is no item {name}; existing items: {there}", hint="append one with +=")


def _is_index(name: str) -> bool:
    """Whether the name is ASCII decimal digits, few enough for `int`."""
    return name.isascii() and name.isdigit() and len(name) < 20


def refusal(message: str, hint: str = "") -> ConfigError:
    """An error with one problem, whose path and place the caller fills in."""
    return ConfigError([Problem(path="", message=message, hint=hint)])
