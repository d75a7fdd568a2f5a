"""Removes secrets from everything that a run writes, prints and sends: by value, by form and by key.

By value: the contents of environment variables whose names mention keys, tokens, passwords or webhooks. By form: user
names and passwords in addresses (`https://user:password@host`), authorization headers, connection strings
(`AccountKey=...`), webhook addresses, tokens with a known beginning, and private keys. By key: texts under `password`,
`Authorization` and the like in tables. Each becomes `***`.
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

from skyrl.tree.masking import HIDDEN, REFERENCE, masked_text

_NAME = re.compile(
    r"KEY|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|(?<![A-Z])PASS(?![A-Z])|.PWD|^PW$|CREDENTIAL|AUTH|COOKIE|WEBHOOK|PRIVATE"
    r"|CONNECTION_?STR|(?<![A-Z])(?:DSN|PAT|SAS|JWT)(?![A-Z])",
    re.IGNORECASE,
)
_OF_A_PLACE = re.compile(r"(?:_PATH|_FILE|_DIR|_FOLDER|_HOME|_SOCK|_SOCKET|_ROOT)$", re.IGNORECASE)
"""Names of variables that hold the location of a secret, not the secret itself."""

_PLACES = ("OLDPWD", "XAUTHORITY", "KUBECONFIG")
_PLAIN = frozenset({int, float, bool, type(None)})
"""Types that contain no text: a list of only these is left as it is, which is faster than checking each item."""

_SHORTEST = 8
"""Minimum number of characters of a value to look for: a shorter one would also be found in words."""

_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""Errors of writing to a closed pipe and to a terminal that hung up."""

_USER_INFO = re.compile(r"(?<=://)[^\s/@\"'<>]+(?=@)")
_HEADER = re.compile(
    r"((?:proxy-)?authorization|(?:x-)?api[-_]key|x-auth-token|cookie)(\\?[\"']?\s*[:=]\s*\\?[\"']?)"
    r"(?:(?:bearer|basic|token)\s+)?[^\s\"'\\,;}{]+",
    re.IGNORECASE,
)
_KEYS = re.compile(  # narrower than the names in configurations: a dataset's `answer_key` is no secret
    r"(?:proxy-)?authorization|(?:x-)?(?:api|auth|access|private|secret|account)[-_]?(?:key|token)|x-auth-token|cookie"
    r"|set-cookie|password|passwd|passphrase|client[-_]?secret|webhook(?:_url)?|connection_?string",
    re.IGNORECASE,
)


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The values to look for, longest first, so that a value that contains another one is removed completely."""
    named = (value.strip() for name, value in environ.items() if _NAME.search(name) and not _is_place(name, value))
    found = {value for value in named if len(value) >= _SHORTEST}
    for value in environ.values():
        for user_info in _USER_INFO.findall(value):
            found |= {part for part in (user_info, *user_info.split(":")[1:]) if len(part) >= _SHORTEST}
    spelled = {form for value in found for form in _spellings(value) if len(form) >= _SHORTEST}
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
    return _HEADER.sub(rf"\1\2{HIDDEN}", clean) if ":" in clean or "=" in clean else clean


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
            return dict(_clean_item(key, each, values) for key, each in data.items())
        case Mapping():
            return {_clean(key, values): _clean(each, values, by_key=False) for key, each in data.items()}
        case list() | tuple() if not _PLAIN.issuperset(map(type, data)):
            return [_clean(item, values, by_key=by_key) for item in data]
        case _:
            return data


def _clean_item(key: object, value: object, values: re.Pattern[str]) -> tuple[object, object]:
    if not isinstance(key, str):
        return _clean(key, values), _clean(value, values)
    clean, names_a_secret = _clean_key(key, values)
    return clean, HIDDEN if names_a_secret and _is_secret(value) else _clean(value, values)


@functools.lru_cache(maxsize=4096)
def _clean_key(key: str, values: re.Pattern[str]) -> tuple[str, bool]:
    """The key without secrets, and whether its value is one. Cached, since all records have the same few keys."""
    return _redacted(key, values), bool(_KEYS.fullmatch(key))


def _is_secret(value: object) -> bool:
    """Whether a value under the name of a secret is a secret, and not a reference to one such as `env:NAME`."""
    return isinstance(value, str) and bool(value) and not REFERENCE.fullmatch(value)


class RedactedStream:
    """A text stream that passes on what is written to it, without secrets.

    If its reader is gone (a closed pipe or terminal), the text is dropped: a run does not depend on its reader.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to the stream. Raises OSError if the output cannot be written although it has a reader."""
        with self._reader_may_be_gone():
            self._stream.write(redacted(text))
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


@functools.lru_cache(maxsize=4)
def _of_environment(environ: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Pattern that finds every secret of an environment, and nothing if there are none."""
    return re.compile("|".join(map(re.escape, secrets_of(dict(environ)))) or r"(?!)")


class _Known:
    """The pattern of the current environment, rebuilt only if a variable has changed, not for each line."""

    def __init__(self) -> None:
        self._seen: dict[Any, Any] | None = None
        self._pattern = re.compile(r"(?!)")

    def __call__(self) -> re.Pattern[str]:
        current = vars(os.environ)["_data"]  # compared as a whole, without decoding each variable
        if current != self._seen:
            self._seen = dict(current)
            self._pattern = _of_environment(tuple(os.environ.items()))
        return self._pattern


_of_values = _Known()
