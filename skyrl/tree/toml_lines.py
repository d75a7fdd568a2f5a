"""Finds the line of each key of a TOML text, by a scan for headers, keys and the ends of statements."""

from __future__ import annotations

import re
import tomllib

from skyrl.tree.origins import Path

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


def scan_lines(text: str) -> dict[Path, int]:
    """Line of each header and key of a valid TOML text: path -> 1-based line. Items of `[[x]]` share a path."""
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
    """Position after the newline that ends the statement; one in a string, list or inline table does not end it."""
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
    return tuple(
        str(tomllib.loads(f"value = {part}")["value"]) if part[0] in "\"'" else part for part in _PART.findall(key)
    )
