"""Reads files: a configuration of any format, with the files it extends, as assignments in order of precedence; and the
text of files that programs wrote.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn

from attrs import evolve

from skyrl.errors import ConfigError, Problem
from skyrl.tree.names import nearest
from skyrl.tree.origins import Assignment, KeyLines, Origin, Path
from skyrl.tree.syntax_errors import UNREADABLE, malformed
from skyrl.tree.types import display_value

EXTENDS = "extends"
"""Top-level key that names what the file extends: files, by path relative to this one, or `preset:NAME`."""

PRESET = "preset:"

STORED_FILES = ("config.json", "manifest.json")
"""Names of files with a stored tree: in the folder of a run, and of a checkpoint, whose manifest holds the same and
more."""

MOST_LEVELS = 100
"""Longest chain of files that extend each other."""

MOST_BYTES = 2**18
"""Largest file, and longest argument, that is read as a configuration: parsing more would take seconds."""

MOST_STORED = 2**26
"""Largest file that is read as a record of a run, a checkpoint or a model."""

MOST_PARTS = 60
"""Largest number of parts of a dotted key: parse time in `tomllib` grows at least with the square of their number."""

_LONG_KEY = rf"""(?m)^[ \t\[]*+(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}"""
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

Presets = Mapping[str, Mapping[str, Any]]
"""Name -> tables, for `extends = "preset:NAME"`."""


def read_file(name: str, presets: Presets = MappingProxyType({})) -> list[Assignment]:
    """Assignments to the root: first from what the file extends, then the file's own. `name` may also be a preset.

    A file that several others extend is applied once, where it first occurs. Raises `ConfigError`, for text that is
    not TOML, YAML or JSON with line and column.
    """
    return _Reading(presets).read(name)


def stored_file(name: str) -> str:
    """The configuration of a run's folder, if `name` is one; `name` otherwise."""
    inside = (os.path.join(os.path.expanduser(name), file) for file in STORED_FILES)
    return next((file for file in inside if os.path.isfile(file)), name)  # unlike Path.is_file, False for any OSError


def is_stored_form(value: object) -> bool:
    """Is it a configuration as a run stores it, with its fingerprint, rather than one written by hand?"""
    return isinstance(value, Mapping) and {"config", "fingerprint"} <= value.keys()


class _Reading:
    """Reads one file and everything it extends."""

    def __init__(self, presets: Presets) -> None:
        self._presets = presets
        self._done: set[str] = set()

    def read(self, name: str, above: tuple[str, ...] = ()) -> list[Assignment]:
        """The file's assignments, after those of the files it extends; `above` are the files that led here."""
        if name.startswith(PRESET):
            preset = name.removeprefix(PRESET)
            if preset not in self._presets:
                meant = nearest(preset, tuple(self._presets))
                hint = f"did you mean {PRESET}{meant}?" if meant else f"presets: {', '.join(self._presets) or 'none'}"
                raise ConfigError([Problem(path=name, message="no such preset", hint=hint)], title=UNREADABLE)
            origin = Origin(kind="preset", where=preset)
            return [Assignment(path=(), value=self._presets[preset], origin=origin)]
        assignment = _read_file(name)
        if not (isinstance(assignment.value, Mapping) and EXTENDS in assignment.value):
            return [assignment]
        location = assignment.origin.at(EXTENDS).location
        if is_stored_form(assignment.value):
            raise _refused(f"a stored configuration cannot have {EXTENDS}: this file was edited", location)
        bases, chain = _bases(assignment.value[EXTENDS], location), (*above, _identity(name))
        inherited = [item for base in bases for item in self._base(name, base, location, chain)]
        own = {key: value for key, value in assignment.value.items() if key != EXTENDS}
        return [*inherited, evolve(assignment, value=own)] if own or not bases else inherited

    def _base(self, name: str, base: str, location: str, chain: tuple[str, ...]) -> list[Assignment]:
        """Assignments of one file that `name` extends; empty if they were already included."""
        target = base if base.startswith((PRESET, "~")) else str(FilePath(name).parent / base)
        identity = target if base.startswith(PRESET) else _identity(target)
        if identity in chain:
            raise _refused(f"circular reference: {base} extends this file, directly or indirectly", location)
        if len(chain) > MOST_LEVELS:
            raise _refused(f"the chain of extended files is longer than {MOST_LEVELS}", location)
        if identity in self._done:
            return []
        try:
            assignments = self.read(target, chain)
        except ConfigError as error:  # a missing file, for one, has no place of its own
            problems = [evolve(problem, location=problem.location or location) for problem in error.problems]
            raise ConfigError(problems, title=error.title) from None
        self._done.add(identity)
        return assignments


def _bases(named: object, location: str) -> list[str]:
    """Files and presets that `extends` names, in order. Raises `ConfigError`."""
    bases = [named] if isinstance(named, str) else named if isinstance(named, list | tuple) else [None]
    if not all(isinstance(base, str) for base in bases):
        raise _refused(f"{display_value(named)} is neither a file nor a list of files", location)
    return list(bases)


def _identity(name: str) -> str:
    try:
        return str(FilePath(name).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise cannot_read(name, str(error)) from None


def _refused(message: str, location: str) -> ConfigError:
    return ConfigError([Problem(path=EXTENDS, message=message, location=location)], title=UNREADABLE)


def _read_file(name: str) -> Assignment:
    """The whole file as one assignment to the root, whose origin knows the lines of its keys."""
    text = read_text(name)
    match FilePath(name).suffix.lower():
        case ".yaml" | ".yml":
            from skyrl.tree.yaml_file import parse_yaml  # libyaml is loaded for YAML alone

            value, known = parse_yaml(name, text)
            lines = KeyLines(lambda: known)
        case ".json":
            value, lines = _parsed_json(name, text), KeyLines(lambda: _json_lines(name, text))
        case _:
            value, lines = _parsed_toml(name, text), KeyLines(lambda: _toml_lines(text))
    return Assignment(path=(), value=value, origin=Origin(kind="file", where=name, lines=lines))


def _parsed_toml(name: str, text: str) -> dict[str, Any]:
    import tomllib

    if text.count(".") >= MOST_PARTS and (match := re.search(_LONG_KEY, text)):
        line = text.count("\n", 0, match.start()) + 1
        raise malformed(name, "TOML", f"a key has more than {MOST_PARTS} parts", line)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        reason = str(error)
    except RecursionError:
        reason = "nested too deeply"
    position: tuple[int, ...] = ()
    if match := re.search(r" \(at line (\d+), column (\d+)\)$", reason):
        position = int(match[1]), int(match[2])
    elif match := re.search(r" \(at end of document\)$", reason):
        last = text.rstrip()
        position = last.count("\n") + 1, len(last.rpartition("\n")[2]) + 1
    raise malformed(name, "TOML", reason[: match.start()] if match else reason, *position, text=text)


def _toml_lines(text: str) -> dict[Path, int]:
    from skyrl.tree.toml_lines import scan_lines  # rarely needed, and its patterns take milliseconds to compile

    return scan_lines(text)


def _parsed_json(name: str, text: str) -> Any:
    """The value, nulls included. Duplicate keys and numbers that are not finite are refused."""
    import json

    try:
        return json.loads(text, object_pairs_hook=_table, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise malformed(name, "JSON", error.msg, error.lineno, error.colno, text=text) from None
    except ValueError as error:  # a duplicate key, NaN, or a number with thousands of digits
        raise malformed(name, "JSON", str(error)) from None
    except RecursionError:
        raise malformed(name, "JSON", "nested too deeply") from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {display_value(twice)} appears twice in one table")
    return table


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the constant {constant} is not a JSON number")


def _json_lines(name: str, text: str) -> dict[Path, int]:
    """Path -> line of each key, from the YAML reader: every JSON text is also YAML."""
    from skyrl.tree.yaml_file import parse_yaml

    try:
        return parse_yaml(name, text)[1]
    except ConfigError:  # tabs, which JSON allows and YAML does not
        return {}


def read_text(name: str) -> str:
    """Text of a regular file of at most `MOST_BYTES`, with CRLF line ends converted to line feeds.

    Raises `ConfigError` for a file that is missing, unreadable, too large, not a regular file, or not UTF-8.
    """
    if not name:
        raise cannot_read("''", "the name is empty")
    try:
        path = FilePath(name).expanduser()
        if kind := _irregular_kind(path):  # not even opened: reading a pipe may block or never end
            raise cannot_read(name, f"this is {kind}, not a regular file: write its content to a file first")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise cannot_read(name, f"the file is larger than {MOST_BYTES // 2**10} KiB, the limit for a configuration")
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # Windows editors write a byte order mark first
    except FileNotFoundError:
        raise cannot_read(name, "no such file") from None
    except IsADirectoryError:
        raise cannot_read(name, "this is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise cannot_read(name, f"not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise cannot_read(name, error.strerror or str(error)) from None
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:  # a zero byte in the name; no home folder for ~
        raise cannot_read(name, str(error)) from None


def stored_text(path: FilePath) -> str:
    """Text of a file that a program wrote, such as `config.json` in the folder of a run, which may be a stranger's.

    Raises `OSError` for one that is missing or unreadable, and `ValueError` for one that is not UTF-8, not a regular
    file, or larger than `MOST_STORED`.
    """
    with open_stored(path) as file:
        content = file.read(MOST_STORED + 1)
    if len(content) > MOST_STORED:
        raise ValueError(f"it is larger than {MOST_STORED // 2**20} MiB")
    return content.decode("utf-8")


def open_stored(path: FilePath) -> BinaryIO:
    """A file that a program wrote, open for reading. Raises `OSError`, and `ValueError` for one that is not regular."""
    if kind := _irregular_kind(path):
        raise ValueError(f"it is {kind}, not a regular file")
    return path.open("rb")


def _irregular_kind(path: FilePath) -> str:
    """Kind of a file that is not regular, so that reading it may block or never end; empty for other files."""
    mode = os.stat(path).st_mode
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "")


def cannot_read(name: str, reason: str) -> ConfigError:
    """The error for a file that cannot be read at all."""
    return ConfigError([Problem(path=name, message=f"cannot be read: {reason}")], title=UNREADABLE)
