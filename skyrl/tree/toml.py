"""Reading TOML: values by the standard library, line numbers by a scan of the text, and only when one is asked for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path as FilePath

from skyrl.errors import ConfigError, Problem
from skyrl.tree.origins import Assignment, Origin, Path


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
            from skyrl.tree.lines import scan_lines  # few ask, and its patterns take milliseconds to compile

            self._lines = scan_lines(self._text)
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return None


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
