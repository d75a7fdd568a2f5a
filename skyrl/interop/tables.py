"""Nested tables of plain data, as they go into a TOML file."""

from __future__ import annotations

from typing import Any


def put(tables: dict[str, Any], names: tuple[str, ...], value: object) -> None:
    """Set the value at nested names, creating tables on the way. Does nothing if a value on the way is not a table."""
    for name in names[:-1]:
        inner = tables.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        tables = inner
    tables[names[-1]] = value
