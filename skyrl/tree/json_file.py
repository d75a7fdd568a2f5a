"""Reads JSON, including nulls. Duplicate keys and non-finite numbers are refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from skyrl.errors import ConfigError
from skyrl.tree.origins import Assignment, KeyLines, Origin, Path
from skyrl.tree.plain import shown
from skyrl.tree.text_files import malformed, read_text


def read_json(name: str) -> Assignment:
    """The whole file as one assignment to the root. Raises `ConfigError` (with line and column)."""
    text = read_text(name)
    try:
        value = json.loads(text, object_pairs_hook=_table, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise malformed(name, "JSON", error.msg, error.lineno, error.colno, text=text) from None
    except ValueError as error:  # a duplicate key, NaN, or a number with thousands of digits
        raise malformed(name, "JSON", str(error)) from None
    except RecursionError:
        raise malformed(name, "JSON", "nested too deeply") from None
    lines = KeyLines(lambda: _lines_of(name, text))
    return Assignment(path=(), value=value, origin=Origin(kind="file", where=name, lines=lines))


def _lines_of(name: str, text: str) -> dict[Path, int]:
    """Path -> line of each key, from the YAML reader: every JSON text is also YAML."""
    from skyrl.tree.yaml_file import parse_yaml

    try:
        return parse_yaml(name, text)[1]
    except ConfigError:  # tabs, which JSON allows and YAML does not
        return {}


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} appears twice in one table")
    return table


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the constant {constant} is not a JSON number")
