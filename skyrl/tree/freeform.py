"""Writing into free-form tables, which are plain dictionaries and lists while they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from skyrl.errors import ConfigError, Problem
from skyrl.tree.frozen import thaw
from skyrl.tree.origins import Path


def enter(holder: dict[str, Any], names: Path) -> Any:
    """The table, or list, in which the last of `names` is to be written; tables that are missing are made.

    A list is entered where an index follows; where a key does, a table takes its place.
    """
    inner: Any = holder
    for name, following in pairwise(names):
        if isinstance(inner, list):
            raise refusal(f"item {name} is no table that could be written into")
        child = inner.get(name)
        if isinstance(child, dict) or (isinstance(child, list) and _is_index(following)):
            inner = child
        else:
            inner[name] = inner = {}
    return inner


def make_way(holder: dict[str, Any], names: Path) -> None:
    """A list at `names` gives place to the table that is written there: the table's keys are no indices."""
    inner = enter(holder, names)
    if isinstance(inner, dict) and isinstance(inner.get(names[-1]), list):
        inner[names[-1]] = {}


def forget(holder: dict[str, Any], names: Path, default: object) -> None:
    """The value at `names` as it is in the default table; gone where that has none."""
    for name in names[:-1]:
        holder = holder.get(name, {}) if isinstance(holder, dict) else {}
        default = default.get(name) if isinstance(default, Mapping) else None
    if isinstance(default, Mapping) and names[-1] in default:
        holder[names[-1]] = thaw(default[names[-1]])
    elif isinstance(holder, dict):
        holder.pop(names[-1], None)


def append(holder: dict[str, Any], name: str, value: object) -> None:
    """Add an item, or the items of a list, to the list under `name`; there may be none yet."""
    current = holder.get(name, [])
    if not isinstance(current, list):
        raise refusal("is no list, so that nothing can be added to it")
    holder[name] = [*current, *(thaw(value) if isinstance(value, list | tuple) else [thaw(value)])]


def position(name: str, items: Sequence[object]) -> int:
    """The index of an item that is there. Raises `ConfigError`."""
    if _is_index(name) and int(name) < len(items):
        return int(name)
    there = f"0 to {len(items) - 1}" if items else "none"
    raise refusal(f"there is no item {name}; there are: {there}", hint="add one with +=")


def _is_index(name: str) -> bool:
    """Decimal digits of ASCII, and few enough that `int` takes them."""
    return name.isascii() and name.isdigit() and len(name) < 20


def refusal(message: str, hint: str = "") -> ConfigError:
    """One problem, whose path and place are put in by the caller."""
    return ConfigError([Problem(path="", message=message, hint=hint)])
