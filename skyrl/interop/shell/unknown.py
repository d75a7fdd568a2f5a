"""Texts of which a part is known only when the script runs: `$(date)`, `$NAME` of a variable that nobody sets.

Such a part stands in the text by its source, between two marks, so that texts can be joined and stored in variables
without losing track of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OPEN, _CLOSE, _DOLLAR = "\ue000", "\ue001", "\ue002"  # private use: `without_marks` removes them from scripts
UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_EXPANDABLE = re.compile(r"\$(?=[A-Za-z_\d@*#(])")
_OUTSIDE = re.compile(r"\$([A-Za-z_]\w*)")


def unknown(source: str) -> str:
    """A text that is unknown as a whole, from its source such as `$(date)`."""
    return _OPEN + UNKNOWN.sub(r"\1", source) + _CLOSE


def is_known(text: str) -> bool:
    """Whether the whole text is known."""
    return _OPEN not in text


def shown(text: str) -> str:
    """The text with the source of each unknown part in its place."""
    return UNKNOWN.sub(r"\1", text)


def as_argument(text: str) -> str:
    """The text with the source of each unknown part in its place, and with a mark for each dollar that Bash passes on
    as it is and that would otherwise look like an expansion: `'$NAME'`. `with_dollars` puts the dollars back.
    """
    parts = UNKNOWN.split(text)  # known parts alternate with the sources of unknown ones
    return "".join(part if at % 2 else _EXPANDABLE.sub(_DOLLAR, part) for at, part in enumerate(parts))


def with_dollars(value: object) -> object:
    """The text, list or table with its dollars back, after references in it were followed."""
    if isinstance(value, str):
        return value.replace(_DOLLAR, "$")
    if isinstance(value, list):
        return [with_dollars(item) for item in value]
    if isinstance(value, Mapping):
        return {with_dollars(key): with_dollars(item) for key, item in value.items()}
    return value


def separated(text: str) -> list[str]:
    """The parts of the text between spaces, apart from those in the source of an unknown part."""
    rest = iter([match[0] for match in UNKNOWN.finditer(text)])
    parts = re.findall(r"[^ \t\n]+", UNKNOWN.sub(_OPEN, text))
    return ["".join(next(rest) if letter == _OPEN else letter for letter in part) for part in parts]


def outside(text: str) -> list[str] | None:
    """Variables that the text takes from outside of the script; None if a part of it is unknown for another reason."""
    matches = [_OUTSIDE.fullmatch(source) for source in UNKNOWN.findall(text)]
    return [str(match[1]) for match in matches if match] if all(matches) else None


def without_marks(text: str) -> str:
    """A script's text without the characters that mark unknown parts here."""
    return re.sub(f"[{_OPEN}{_CLOSE}{_DOLLAR}]", "?", text)
