"""Secrets kept out of what a run writes, prints and sends, by value and by form.

By value: what stands in environment variables whose names speak of keys, tokens or passwords. By form: user names and
passwords in addresses (`https://user:password@host`), and what follows `Authorization:` or `Bearer`. Each becomes
`***`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, unquote

from skyrl.tree.secrets import HIDDEN

_NAME = re.compile(r"KEY|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_SHORTEST = 8
"""Letters of a value that is looked for: a shorter one would be found in words."""

_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""What writing to a closed pipe and to a terminal that hung up fails with."""

_USER_INFO = re.compile(r"(?<=://)[^\s/@\"'<>]+(?=@)")
_HEADER = re.compile(
    r"((?:proxy-)?authorization|(?:x-)?api[-_]key|x-auth-token|cookie)(\\?[\"']?\s*[:=]\s*\\?[\"']?)"
    r"(?:(?:bearer|basic|token)\s+)?[^\s\"'\\,;}{]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The values to look for, longest first: the longer one is not left in half."""
    named = (value.strip() for name, value in environ.items() if _NAME.search(name) and not value.startswith("/"))
    found = {value for value in named if len(value) >= _SHORTEST}
    for value in environ.values():
        for user_info in _USER_INFO.findall(value):
            found |= {part for part in (user_info, *user_info.split(":")[1:]) if len(part) >= _SHORTEST}
    spelled = {form for value in found for form in _spellings(value) if len(form) >= _SHORTEST}
    return sorted(spelled, key=len, reverse=True)


def _spellings(value: str) -> Iterator[str]:
    """As it is, in Python and JSON, and in an address."""
    yield from (value, repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    yield from (quote(value, safe=""), unquote(value))


def redacted(text: str) -> str:
    """The text without secrets."""
    return _HEADER.sub(rf"\1\2{HIDDEN}", _redacted(text, _of_values(tuple(os.environ.items()))))


def _redacted(text: str, values: re.Pattern[str]) -> str:
    text = values.sub(HIDDEN, text)
    if "://" in text:
        text = _USER_INFO.sub(HIDDEN, text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def redacted_tree(data: Any) -> Any:
    """The same for every text in JSON-able data, keys included; but headers stay: an answer may speak of cookies."""
    values = _of_values(tuple(os.environ.items()))

    def clean(data: Any) -> Any:
        match data:
            case str():
                return _redacted(data, values)
            case Mapping():
                return {clean(key): clean(value) for key, value in data.items()}
            case list() | tuple() if any(isinstance(item, str | Mapping | list | tuple) for item in data):
                return [clean(item) for item in data]
            case _:
                return data

    return clean(data)


class RedactedStream:
    """A text stream that passes on what it is given without secrets.

    If its reader is gone (a closed pipe or terminal), what is written is dropped: a run does not depend on being read.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's own. Raises OSError if the output cannot be written although somebody wants it."""
        with self._reader_may_be_gone():
            self._stream.write(redacted(text))
        return len(text)

    def flush(self) -> None:
        """As the stream's own."""
        with self._reader_may_be_gone():
            self._stream.flush()

    @contextlib.contextmanager
    def _reader_may_be_gone(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            self.discard()

    def discard(self) -> None:
        """Send the rest to nowhere, what is still in the stream's buffer and what native code writes included."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def writelines(self, lines: Iterable[str]) -> None:
        """As the stream's own."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@functools.lru_cache(maxsize=4)
def _of_values(environ: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """What finds every secret of an environment; without any, nothing."""
    return re.compile("|".join(map(re.escape, secrets_of(dict(environ)))) or r"(?!)")
