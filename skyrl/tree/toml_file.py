"""Reads TOML: values with the standard library, line numbers by a scan of the text when the first one is requested."""

from __future__ import annotations

import re
import tomllib

from skyrl.errors import ConfigError
from skyrl.tree.origins import Assignment, KeyLines, Origin, Path
from skyrl.tree.text_files import malformed, read_text

MOST_PARTS = 60
"""Largest number of parts of a dotted key: parse time in `tomllib` grows at least with the square of their number."""

_LONG_KEY = rf"""(?m)^[ \t\[]*+(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}"""


def read_toml(name: str) -> Assignment:
    """The whole file as one assignment to the root, with an origin that knows its lines.

    Raises `ConfigError` for a file that is missing, unreadable, or not TOML (with line and column).
    """
    text = read_text(name)
    if text.count(".") >= MOST_PARTS and (found := re.search(_LONG_KEY, text)):
        line = text.count("\n", 0, found.start()) + 1
        raise malformed(name, "TOML", f"a key has more than {MOST_PARTS} parts", line)
    try:
        value = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        raise _not_toml(name, text, str(error)) from None
    except RecursionError:
        raise _not_toml(name, text, "nested too deeply") from None
    lines = KeyLines(lambda: _lines_of(text))
    return Assignment(path=(), value=value, origin=Origin(kind="file", where=name, lines=lines))


def _lines_of(text: str) -> dict[Path, int]:
    from skyrl.tree.toml_lines import scan_lines  # rarely needed, and its patterns take milliseconds to compile

    return scan_lines(text)


def _not_toml(name: str, text: str, why: str) -> ConfigError:
    position: tuple[int, ...] = ()
    if found := re.search(r" \(at line (\d+), column (\d+)\)$", why):
        position = int(found[1]), int(found[2])
    elif found := re.search(r" \(at end of document\)$", why):
        last = text.rstrip()
        position = last.count("\n") + 1, len(last.rpartition("\n")[2]) + 1
    return malformed(name, "TOML", why[: found.start()] if found else why, *position, text=text)
