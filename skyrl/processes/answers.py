"""Requests to servers that others operate, and their answers: decoded JSON becomes an attrs class, or a `BadAnswer`
says what it is.

    @frozen
    class Scores:
        scores: tuple[float, ...]

    read({"scores": [1.5]}, Scores)  # Scores(scores=(1.5,))
    read({"scores": ["1.5"]}, Scores)  # BadAnswer: with '1.5' for scores[]

A field without a default must be there; fields that the class does not have are ignored.

`posted` sends a POST request with one deadline from the connection to the last byte. It goes only to the given address:
redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterable, Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache, partial
from types import NoneType, UnionType
from typing import TypeVar, Union, cast, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

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


class _Deadline:
    """Ends a request after a number of seconds, whatever its server sends: the timeout of a socket only bounds the wait
    for the next byte.
    """

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self.connected: socket.socket | None = None
        """The connection, if it was made in time."""
        self.is_over = False

    def __enter__(self) -> _Deadline:
        _OF_THREAD.deadline = self
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        _OF_THREAD.deadline = None

    def watch(self, connected: socket.socket) -> None:
        """Close this connection at the deadline."""
        self.connected = connected
        if self.is_over:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        if self.connected is not None:
            with suppress(OSError):  # it was closed meanwhile
                socket.socket.shutdown(self.connected, socket.SHUT_RDWR)  # TLS's own would wait for the other side


_OF_THREAD = threading.local()
"""The deadline of the request that the thread is making."""


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _watched(self.sock)


class _TLSConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _watched(self.sock)


def _watched(connected: socket.socket) -> None:
    deadline = cast(_Deadline | None, getattr(_OF_THREAD, "deadline", None))
    if deadline is not None:
        deadline.watch(connected)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


_tls = cache(ssl.create_default_context)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TLSConnection, request, context=_tls())


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the configured address is contacted."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects, _Http, _Https)


def posted(url: str, body: Mapping[str, object], headers: Mapping[str, str], *, seconds: float, longest: int) -> object:
    """The decoded JSON that a service answers to a JSON object, at most `longest` bytes, within `seconds`.

    Raises `HTTPError` for a status of 300 or more, `URLError` if no connection is made, `OSError` if no whole answer
    comes in time, and `BadAnswer` for one that is not JSON or too long.
    """
    content = b""
    try:
        urlsplit(url).port  # noqa: B018  # raises for one above 65535, which would pass for a service that is away
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
        )
        with _Deadline(seconds) as deadline:
            try:
                with _OPENER.open(request, timeout=seconds) as response:
                    content = response.read(longest + 1)
                    if getattr(response, "length", 0) and len(content) <= longest:  # `read` does not tell
                        raise OSError(f"its answer breaks off after {len(content)} bytes")
            except urllib.error.HTTPError:
                raise
            except OSError:
                if not deadline.is_over:
                    raise
                if deadline.connected is None:
                    raise urllib.error.URLError(f"no connection within {seconds:g} s") from None
            except http.client.HTTPException as error:
                if not deadline.is_over:
                    raise OSError(f"its answer breaks off or is not HTTP ({type(error).__name__})") from error
            if deadline.is_over:
                raise TimeoutError(f"it did not answer within {seconds:g} s")
    except (ValueError, OverflowError) as error:  # of the address, or of a header
        raise OSError(f"no request can be made: {error}") from error
    if len(content) > longest:
        raise BadAnswer(f"with more than {longest} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"with something that is not JSON ({type(error).__name__})") from error
