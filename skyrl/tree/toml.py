"""Reading TOML: values by the standard library, line numbers by a scan of the text, and only when one is asked for."""

from __future__ import annotations

import re
import tomllib

from skyrl.errors import ConfigError
from skyrl.tree.origins import Assignment, Origin, Path
from skyrl.tree.text_files import malformed, read_text


def read_toml(name: str) -> Assignment:
    """The whole file as one assignment to the root, with an origin that knows its lines.

    Raises `ConfigError` for a file that is missing, unreadable, or not TOML (with line and column).
    """
    text = read_text(name)
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
            from skyrl.tree.lines import scan_lines  # few ask, and its patterns take milliseconds to compile

            self._lines = scan_lines(self._text)
        return nearest_line(self._lines, path)


def nearest_line(lines: dict[Path, int], path: Path) -> int | None:
    """The line of the path, or of the innermost table or list around it that has one."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def _not_toml(name: str, text: str, why: str) -> ConfigError:
    position: tuple[int, ...] = ()
    if found := re.search(r"\(at line (\d+), column (\d+)\)", why):
        position = int(found[1]), int(found[2])
    elif "(at end of document)" in why:
        position = (text.count("\n") + 1,)
    return malformed(name, "TOML", why, *position)
