"""Reads answers of servers that others operate: decoded JSON becomes an attrs class, or a `BadAnswer` says what it is.

    @frozen
    class Scores:
        scores: tuple[float, ...]

    read({"scores": [1.5]}, Scores)  # Scores(scores=(1.5,))
    read({"scores": ["1.5"]}, Scores)  # BadAnswer: with '1.5' for scores[]

A field without a default must be there; fields that the class does not have are ignored.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterable, Callable
from email.utils import parsedate_to_datetime
from functools import cache, partial
from types import NoneType, UnionType
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

T = TypeVar("T")

_Reader = Callable[[object, str], object]

_LONGEST_WAIT = 60.0
"""Longest wait, in seconds, that a server may ask for."""


class BadAnswer(ValueError):
    """An answer that does not have the expected form, or does not match its request; the message continues "the server
    answers".
    """


def read(answer: object, kind: type[T], label: str = "an answer") -> T:
    """`answer` as an instance of `kind`: an attrs class, `str`, `bool`, `int` of 64 bits, finite `float`, a tuple of
    one of these, or a union. `label` names the value in messages. Raises `BadAnswer`.
    """
    return _reader(kind)(answer, label)  # type: ignore[arg-type,return-value]  # a type is hashable; it reads a `kind`


async def collected(pieces: AsyncIterable[bytes], *, longest: int, seconds: float) -> bytes | None:
    """The whole of a body; None if it has more than `longest` bytes. Raises TimeoutError if it does not end in time."""
    content = bytearray()
    async with asyncio.timeout(seconds):
        async for piece in pieces:
            content += piece
            if len(content) > longest:
                return None
    return bytes(content)


def display_value(value: object) -> str:
    """A value of an answer, in at most 80 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number with too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def asked_to_wait(retry_after: str) -> float:
    """Seconds of the header `Retry-After`, which holds a number of seconds or an HTTP date (RFC 9110, 10.2.3): 0 to 60.
    0 for any other text.
    """
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:18]), _LONGEST_WAIT)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT)


def _wrong(value: object, label: str) -> BadAnswer:
    return BadAnswer(f"with {display_value(value)} for {label}")


@cache
def _reader(kind: object) -> _Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is object:
        return lambda value, label: value
    if kind is int:
        return _whole
    if kind is float:
        return _real
    if origin is tuple:
        return partial(_several, _reader(arguments[0]))
    if origin in (Union, UnionType):
        return partial(_read_union, tuple(map(_reader, arguments)))
    if isinstance(kind, type) and attrs.has(kind):
        return partial(_fields, kind)
    assert kind in (str, bool, NoneType), f"answers have no {kind}"
    return partial(_exactly, kind)


def _exactly(kind: object, value: object, label: str) -> object:
    if type(value) is not kind:
        raise _wrong(value, label)
    return value


def _whole(value: object, label: str) -> object:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise _wrong(value, label)
    return value


def _real(value: object, label: str) -> object:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass  # a whole number that no float holds
    raise _wrong(value, label)


def _several(read_item: _Reader, value: object, label: str) -> object:
    if not isinstance(value, list):
        raise _wrong(value, label)
    name = f"{label}[]"
    return tuple(read_item(item, name) for item in value)


def _read_union(readers: tuple[_Reader, ...], value: object, label: str) -> object:
    errors = []
    for reader in readers:
        try:
            return reader(value, label)
        except BadAnswer as error:
            errors.append(error)
    raise errors[0]


@cache
def _types(kind: type) -> tuple[tuple[str, _Reader, bool], ...]:
    """Name, reader and whether it must be there, of each field."""
    types = get_type_hints(kind)
    return tuple(
        (field.name, _reader(types[field.name]), field.default is attrs.NOTHING) for field in attrs.fields(kind)
    )


def _fields(kind: type, value: object, label: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(value, label)
    below = "" if label == "an answer" else f"{label}."
    values = {}
    for name, reader, required in _types(kind):
        if name in value:
            values[name] = reader(value[name], below + name)
        elif required:
            raise BadAnswer(f"without {below}{name}")
    return kind(**values)
