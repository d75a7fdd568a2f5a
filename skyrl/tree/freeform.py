"""Writes into free-form tables, which are plain dictionaries and lists during construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from skyrl.errors import ConfigError, Problem, ProblemCode
from skyrl.tree.frozen import thaw
from skyrl.tree.origins import Path


def enter(holder: dict[str, Any], names: Path) -> Any:
    """The table or list into which the last of `names` is written; missing tables are created.

    A list is entered if the next name is an index; if it is a key, a table replaces the list. Raises `ConfigError` for
    an item that does not exist, or into which nothing can be written.
    """
    inner: Any = holder
    for name, following in pairwise(names):
        if isinstance(inner, list):
            inner = inner[position(name, inner)]
            if not isinstance(inner, dict | list):
                raise refusal(f"item {name} is neither a table nor a list: it has no {following}")
            continue
        child = inner.get(name)
        if isinstance(child, dict) or (isinstance(child, list) and _is_index(following)):
            inner = child
        else:
            inner[name] = inner = {}
    return inner


def make_way(holder: dict[str, Any], names: Path) -> None:
    """Replace a list at `names`, or a list item other than a table, by a table: keys are about to be written there."""
    inner, last = enter(holder, names), names[-1]
    if isinstance(inner, list):
        at = position(last, inner)
        inner[at] = inner[at] if isinstance(inner[at], dict) else {}
    elif isinstance(inner.get(last), list):
        inner[last] = {}


def outermost(holder: dict[str, Any], names: Path) -> Path:
    """The names that lead to the first list on the way to `names`; all of them if there is none."""
    inner: Any = holder
    for depth, name in enumerate(names):
        if isinstance(inner, list):
            return names[:depth]
        inner = inner.get(name) if isinstance(inner, dict) else None
    return names


def forget(holder: dict[str, Any], names: Path, default: object) -> None:
    """Reset the value at `names` to the default table's, or remove it if the default has none. Raises `ConfigError` if
    there is nothing to reset, and for a list item, which cannot be removed.
    """
    inner: Any = holder
    for name in names[:-1]:
        child = inner[position(name, inner)] if isinstance(inner, list) else inner.get(name)
        if not isinstance(child, dict | list):
            raise _reset_error(inner)
        inner = child
        default = default.get(name) if isinstance(default, Mapping) else None
    last = names[-1]
    if isinstance(inner, list):
        raise refusal("a list item cannot be removed", hint="write the whole list as one value")
    if isinstance(default, Mapping) and last in default:
        inner[last] = thaw(default[last])
    elif last in inner:
        del inner[last]
    else:
        raise _reset_error(inner)


def _reset_error(inside: dict[str, Any] | list[Any]) -> ConfigError:
    entries = ", ".join(inside) if isinstance(inside, dict) else ""
    return refusal("there is no such entry to reset", hint=f"entries: {entries}" if entries else "")


def append(holder: dict[str, Any] | list[Any], name: str, value: object) -> None:
    """Add an item, or the items of a list, to the list under `name`: a key, where a missing list is created, or the
    index of an existing item.
    """
    at: Any = position(name, holder) if isinstance(holder, list) else name
    current = holder.setdefault(name, []) if isinstance(holder, dict) else holder[at]
    if not isinstance(current, list):
        raise refusal("is not a list, so nothing can be appended to it")
    current += thaw(value) if isinstance(value, list | tuple) else [thaw(value)]


def position(name: str, items: Sequence[object]) -> int:
    """The index of an existing item. Raises `ConfigError` if there is no such item."""
    if _is_index(name) and int(name) < len(items):
        return int(name)
    existing = f"0 to {len(items) - 1}" if len(items) > 1 else "0" if items else "none"
    raise refusal(f"there is no item {name}; existing items: {existing}", hint="append one with +=")


def _is_index(name: str) -> bool:
    """Whether the name is ASCII decimal digits, few enough for `int`."""
    return name.isascii() and name.isdigit() and len(name) < 20


def refusal(message: str, hint: str = "", code: ProblemCode = "") -> ConfigError:
    """An error with one problem, whose path and place the caller fills in."""
    return ConfigError([Problem(path="", message=message, hint=hint, code=code)])
