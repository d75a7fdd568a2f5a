"""Reading TOML: values by the standard library, line numbers by a scan of the text, and only when one is asked for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path as FilePath

from skyrl.errors import ConfigError, Problem
from skyrl.tree.origins import Assignment, Origin, Path

_KEY_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_KEY = rf"{_KEY_PART}(?:[ \t]*\.[ \t]*{_KEY_PART})*"
_HEADER = re.compile(rf"[ \t]*(?P<double>\[)?\[[ \t]*(?P<key>{_KEY})[ \t]*\]")
_ASSIGNMENT = re.compile(rf"[ \t]*(?P<key>{_KEY})[ \t]*=")
_PART = re.compile(_KEY_PART)
_TOKEN = re.compile(
    r"""
    "{3} (?:[^\\]|\\.)*? "{3,5}     # the last two quotes may belong to the text
    | '{3} .*? '{3,5}
    | " (?:[^"\\\n]|\\.)* "
    | ' [^'\n]* '
    | \#[^\n]*
    | [\[\]{}\n]
    """,
    re.DOTALL | re.VERBOSE,
)


def read_toml(name: str) -> Assignment:
    """The whole file as one assignment to the root, with an origin that knows its lines.

    Raises `ConfigError` for a file that is missing, unreadable, or not TOML (with line and column).
    """
    try:
        text = FilePath(name).expanduser().read_bytes().decode("utf-8-sig")  # Windows editors write a mark first
    except FileNotFoundError:
        raise _cannot_read(name, "there is no such file") from None
    except IsADirectoryError:
        raise _cannot_read(name, "this is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise _cannot_read(name, f"not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise _cannot_read(name, error.strerror or str(error)) from None
    except (ValueError, RuntimeError) as error:  # a zero byte in the name; no home folder for ~
        raise _cannot_read(name, str(error)) from None
    text = text.replace("\r\n", "\n")
    try:
        value = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise _not_toml(name, text, str(error)) from None
    except RecursionError:
        raise _not_toml(name, text, "nested too deeply") from None
    return Assignment(path=(), value=value, origin=Origin(kind="file", where=name, source=TomlText(name, text)))


class TomlText:
    """The text of a TOML file that parsed, kept so that a key's line can be told."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text
        self._lines: dict[Path, int] | None = None

    def line_of(self, path: Path) -> int | None:
        """Line of the key; for a key inside an inline table or a list, the line of the key that holds it."""
        if self._lines is None:
            self._lines = scan_lines(self._text)
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return None


def scan_lines(text: str) -> dict[Path, int]:
    """Where each header and key of a valid TOML text stands: path -> 1-based line. Items of `[[x]]` share a path."""
    lines: dict[Path, int] = {}
    table: Path = ()
    position, line = 0, 1
    while position < len(text):
        if header := _HEADER.match(text, position):
            table = _parts(header["key"])
            for depth in range(1, len(table)):
                lines.setdefault(table[:depth], line)
            if not (header["double"] and table in lines):
                lines[table] = line
            end = _end_of_statement(text, header.end())
        elif assignment := _ASSIGNMENT.match(text, position):
            key = table + _parts(assignment["key"])
            for depth in range(len(table) + 1, len(key) + 1):
                lines.setdefault(key[:depth], line)
            end = _end_of_statement(text, assignment.end())
        else:  # blank or comment
            end = _end_of_statement(text, position)
        line += text.count("\n", position, end)
        position = end
    return lines


def _end_of_statement(text: str, position: int) -> int:
    """Just after the newline that ends the statement: newlines in strings, lists and inline tables do not."""
    depth = 0
    while token := _TOKEN.search(text, position):
        position = token.end()
        match token[0]:
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
            case "\n" if depth <= 0:
                return position
    return len(text)


def _parts(key: str) -> Path:
    parts = []
    for part in _PART.findall(key):
        parts.append(str(tomllib.loads(f"value = {part}")["value"]) if part[0] in "\"'" else part)
    return tuple(parts)


def _cannot_read(name: str, why: str) -> ConfigError:
    return ConfigError([Problem(path=name, message=f"cannot be read: {why}")], title="The configuration cannot be read")


def _not_toml(name: str, text: str, why: str) -> ConfigError:
    place = name
    if found := re.search(r"\(at line (\d+), column (\d+)\)", why):
        place = f"{name}:{found[1]}:{found[2]}"
    elif "(at end of document)" in why:
        place = f"{name}:{text.count(chr(10)) + 1}"
    problem = Problem(path=name, message=f"not valid TOML: {why[:1].lower()}{why[1:]}", place=place)
    return ConfigError([problem], title="The configuration cannot be read")
