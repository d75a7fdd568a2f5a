"""Removes secrets from everything that a run writes, prints and sends: by value, by form and by key.

By value: the contents of environment variables whose names mention keys, tokens, passwords or webhooks. By form: user
names and passwords in addresses (`https://user:password@host`), authorization headers, connection strings
(`AccountKey=...`), webhook addresses, tokens with a known beginning, and private keys. By key: texts under `password`,
`Authorization` and the like in tables, and assignments to them in printed text. Each becomes `***`. The names and forms
are those of `skyrl.tree.masking`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, unquote

from skyrl.tree.masking import HIDDEN, REFERENCE, SHOWN, USER_INFO, is_secret_name, is_secret_variable, masked_text

_OF_A_PLACE = re.compile(r"(?:_PATH|_FILE|_DIR|_FOLDER|_HOME|_SOCK|_SOCKET|_ROOT)$", re.IGNORECASE)
"""Names of variables that hold the location of a secret, not the secret itself."""

_PLACES = ("OLDPWD", "XAUTHORITY", "KUBECONFIG")
_PLAIN = frozenset({int, float, bool, type(None)})
"""Types that contain no text: a list of only these is left as it is, which is faster than checking each item."""

_SHORTEST = 8
"""Minimum number of characters of a value to look for: a shorter one would also be found in words."""

_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""Errors of writing to a closed pipe and to a terminal that hung up."""

_HEADER = re.compile(
    r"((?:proxy-)?authorization|(?:x-)?api[-_]key|x-auth-token|cookie)(\\?[\"']?\s*[:=]\s*\\?[\"']?)"
    r"(?:(?:bearer|basic|token)\s+)?[^\s\"'\\,;}{]+",
    re.IGNORECASE,
)


@functools.cache
def _printed() -> dict[str, re.Pattern[str]]:
    """Patterns of printed texts alone, compiled when the first text needs them.

    `named` finds what may be the name of a secret, up to its value: an option, or a name before `=` or `:`; `value` a
    value in quotes, or without, and the character behind it.
    """
    return {
        "cookies": re.compile(r"((?:set-)?cookie\\?[\"']?:\s*\\?[\"']?)[^\r\n\"']+", re.IGNORECASE),
        "commands": re.compile(  # curl -u user:password, and a line of netrc
            r"(\bcurl\s(?:[^\n]{0,200}\s)?(?:-u|--user)\s+[^\s:]{1,100}:"
            r"|\bmachine\s+\S{1,200}\s+login\s+\S{1,200}\s+password\s+)\S+"
        ),
        "named": re.compile(r"(?<![\w.-])(?:(--[\w.-]{2,80})\s|([\w.-]{2,80})(\\?[\"']?\s?[:=]\s?))"),
        "value": re.compile(r"(?:b?\\?[\"'])([^\"'\\\n]{1,1024})|([^\s\"'\\,;}{]{1,1024})(?=(.?))"),
        "direction": re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"),
    }


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The values to look for, longest first, so that a value that contains another one is removed completely."""
    named = (
        value.strip() for name, value in environ.items() if is_secret_variable(name) and not _is_place(name, value)
    )
    values = {value for value in named if len(value) >= _SHORTEST}
    for value in environ.values():
        for user_info in USER_INFO.findall(value):
            values |= {part for part in (user_info, *user_info.split(":")[1:]) if len(part) >= _SHORTEST}
    spelled = {form for value in values for form in _spellings(value) if len(form) >= _SHORTEST}
    return sorted(spelled, key=len, reverse=True)


def _is_place(name: str, value: str) -> bool:
    """Whether the variable holds the location of a secret. A key may begin with a slash, too."""
    return name in _PLACES or (value.startswith(("/", "~")) and bool(_OF_A_PLACE.search(name) or os.path.exists(value)))


def _spellings(value: str) -> Iterator[str]:
    """The secret as it is, and as it is written in Python, in JSON and in an address."""
    import json

    yield from (value, repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    yield from (quote(value, safe=""), unquote(value))


def redacted(text: str) -> str:
    """The text without secrets."""
    clean = _redacted(text, _of_values())
    if ":" in clean or "=" in clean:
        clean = _printed()["cookies"].sub(rf"\1{HIDDEN}", _HEADER.sub(rf"\1\2{HIDDEN}", clean))
    if "curl" in clean or "machine" in clean:
        clean = _printed()["commands"].sub(rf"\1{HIDDEN}", clean)
    return _mask_assignments(clean) if ":" in clean or "=" in clean or "--" in clean else clean


def _mask_assignments(text: str) -> str:
    """The text without values of what is called like a secret: `token = "..."`, `--token=...`, `export A_TOKEN=...`.

    A value without quotes may be a word of a sentence or of a program: it needs a digit and a letter, and after a colon
    the end of its line, as in YAML.
    """
    pieces, position, searched = [], 0, 0
    for match in _printed()["named"].finditer(text):
        option, name, sign = match.groups()
        value = (
            _printed()["value"].match(text, match.end())
            if match.start() >= max(position, searched) and _names_a_secret(option or name)
            else None
        )
        if value is None or _is_reference(value[1] or value[2]):
            continue
        bare = value[2] or ""
        is_value = len(bare) >= _SHORTEST and not bare.isdecimal() and any(map(str.isdigit, bare))
        is_placed = bool(option) or sign == "=" or (":" in (sign or "") and not value[3])
        if value[1] or (is_value and is_placed):
            start = value.start(1) if value[1] else value.start(2)
            pieces += [text[position:start], HIDDEN]
            position = value.end(1) if value[1] else value.end(2)
        elif not is_value:
            searched = value.end()
    return "".join((*pieces, text[position:]))


@functools.lru_cache(maxsize=4096)
def _names_a_secret(name: str) -> bool:
    """Whether a name in a printed text is that of a credential; one in capitals may be a variable's."""
    plain = name.lstrip("-")
    return is_secret_name(plain) or (plain.isupper() and is_secret_variable(plain))


def _is_reference(value: str) -> bool:
    return bool(value.startswith(HIDDEN) or REFERENCE.fullmatch(value) or SHOWN.fullmatch(value))


def _redacted(text: str, values: re.Pattern[str]) -> str:
    return masked_text(values.sub(HIDDEN, text))


def redacted_tree(data: object) -> Any:
    """A copy of JSON-able data with every text redacted, keys included. Headers inside texts stay, since an answer may
    mention cookies.
    """
    return _clean(data, _of_values())


def redacted_configuration(stored: object) -> Any:
    """`redacted_tree` of a stored configuration, whose fields say themselves which of them are secrets: a text is
    redacted by its value and form, whatever the name of its field.
    """
    return _clean(stored, _of_values(), by_key=False)


def _clean(data: object, values: re.Pattern[str], *, by_key: bool = True) -> Any:
    match data:
        case str():
            return _redacted(data, values)
        case Mapping() if by_key:
            return dict(_clean_item(key, entry, values) for key, entry in data.items())
        case Mapping():
            return {_clean(key, values): _clean(item, values, by_key=False) for key, item in data.items()}
        case list() | tuple() if not _PLAIN.issuperset(map(type, data)):
            return [_clean(item, values, by_key=by_key) for item in data]
        case _:
            return data


def _clean_item(key: object, value: object, values: re.Pattern[str]) -> tuple[object, object]:
    if not isinstance(key, str):
        return _clean(key, values), _clean(value, values)
    clean, names_a_secret = _clean_key(key, values)
    return clean, _hidden(value, values) if names_a_secret else _clean(value, values)


@functools.lru_cache(maxsize=4096)
def _clean_key(key: str, values: re.Pattern[str]) -> tuple[str, bool]:
    """The key without secrets, and whether its value is one. Cached, since all records have the same few keys."""
    return _redacted(key, values), is_secret_name(key)


def _hidden(value: object, values: re.Pattern[str]) -> object:
    """A value under the name of a secret: every text in it is one, unless it is a reference such as `env:NAME`."""
    match value:
        case str() if value and not _is_reference(value):
            return HIDDEN
        case bytes():
            return HIDDEN
        case list() | tuple():
            return [_hidden(item, values) for item in value]
        case _:
            return _clean(value, values)


class RedactedStream:
    """A text stream that passes on what is written to it, without secrets. A terminal gets the characters that change
    the direction of text as escapes: a name in a stranger's file could hide what stands beside it.

    If its reader is gone (a closed pipe or terminal), the text is dropped: a run does not depend on its reader.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to the stream. Raises OSError if the output cannot be written although it has a reader."""
        with self._reader_may_be_gone():
            clean = redacted(text)
            if not clean.isascii() and self.isatty():
                clean = _printed()["direction"].sub(lambda match: ascii(match[0])[1:-1], clean)
            self._stream.write(clean)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, see `TextIO.flush`."""
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
        """Discard all further output, including the stream's buffer and the output of native code."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines to the stream, see `TextIO.writelines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _CachedPattern:
    """The pattern that finds every secret of the current environment, and nothing if there are none. It is rebuilt only
    if a variable has changed, not for each line.
    """

    _seen: dict[Any, Any] | None = None
    _pattern = re.compile(r"(?!)")

    def __call__(self) -> re.Pattern[str]:
        current = vars(os.environ)["_data"]  # compared as a whole, without decoding each variable
        if current != self._seen:
            self._seen = dict(current)
            self._pattern = re.compile("|".join(map(re.escape, secrets_of(dict(os.environ)))) or r"(?!)")
        return self._pattern


_of_values = _CachedPattern()
