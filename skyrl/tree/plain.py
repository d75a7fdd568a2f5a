"""Plain data, which every file format can hold: null, true and false, numbers, text, and lists and tables of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skyrl.errors import ProblemCode
from skyrl.tree.frozen import FrozenDict, thaw
from skyrl.tree.masking import masked

DEEPEST = 50
"""Deepest nesting of lists and tables in a free-form value."""

MOST_VALUES = 50_000
"""Largest number of values in one file, and assigned to one tree in total."""

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
"""Names of these types in messages."""


class TypeMismatch(ValueError):
    """A value that its type does not allow. The message is a sentence about the value: `'fast' is not a number`."""

    def __init__(self, message: str, hint: str = "", code: ProblemCode = "", value: object = None) -> None:
        super().__init__(message)
        self.hint, self.code, self.value = hint, code, value


def plain(value: object, depth: int = 0) -> Any:
    """`value`, frozen, if it is plain data. Raises `TypeMismatch`."""
    if value is None or type(value) is bool:
        return value
    if type(value) is float:
        return number(value)
    if type(value) in (int, str):
        return scalar(value, type(value))
    if depth == DEEPEST:
        raise TypeMismatch(f"lists and tables are nested more than {DEEPEST} levels deep")
    if isinstance(value, list | tuple):
        return tuple(plain(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return FrozenDict({key_of_table(key): plain(item, depth + 1) for key, item in value.items()})
    raise TypeMismatch(f"{shown(value)} is not plain data: null, true or false, a number, text, a list or a table")


def count_values(value: object, most: int) -> int:
    """Number of values in lists and tables at any depth, including the outermost; counting stops beyond `most`."""
    count, waiting = 1, [value]
    while waiting and count <= most:
        inner = waiting.pop()
        if isinstance(inner, list | tuple | Mapping):
            count += len(inner)
            waiting += inner.values() if isinstance(inner, Mapping) else inner
    return count


def scalar(value: object, kind: type) -> Any:
    """`value` if it is exactly a bool, an int (of at most 64 bits) or a str (that UTF-8 can hold). Raises
    `TypeMismatch`.
    """
    if type(value) is not kind:
        raise TypeMismatch(f"{shown(value)} is not {NAMES[kind]}", hint=_spelling_hint(value, kind))
    if kind is int and isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TypeMismatch(f"{shown(value)} does not fit into 64 bits")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeMismatch(f"{shown(value)} is not Unicode text") from None
    return value


def number(value: Any) -> float:
    """`value` as a finite float, if it is an int or a float. Raises `TypeMismatch`."""
    if type(value) not in (int, float):
        raise TypeMismatch(f"{shown(value)} is not {NAMES[float]}", hint=_spelling_hint(value, float))
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise TypeMismatch(f"{shown(value)} is not a finite number")
    return converted + 0.0  # never -0.0, which equals 0.0 and would have another fingerprint


def key_of_table(key: object) -> str:
    """`key` if it is text. Raises `TypeMismatch`."""
    if type(key) is not str:
        raise TypeMismatch(f"key {shown(key)} is not text")
    scalar(key, str)
    return key


def shown(value: object) -> str:
    """A value for messages: as it is spelled, without secrets, shortened if long."""
    try:
        text = repr(_without_secrets(value))
    except (ValueError, RecursionError):  # an integer with thousands of digits, or lists nested too deeply
        text = f"this {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"


def _without_secrets(value: object) -> object:
    if not isinstance(value, str | Mapping | list | tuple):
        return value
    hidden = masked(value)
    return value if hidden == thaw(value) else hidden


def _spelling_hint(value: Any, kind: type) -> str:
    if kind is str:
        return "put it in quotes" if type(value) in (bool, int, float) else ""
    if type(value) is not str:
        return ""
    try:
        meant = value.lower() in ("true", "false") if kind is bool else math.isfinite(kind(value))
    except (ValueError, OverflowError):
        return ""
    return "remove the quotes" if meant else ""
