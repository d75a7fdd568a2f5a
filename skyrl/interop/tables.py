"""Nested tables of plain data, as they go into a TOML file."""

from __future__ import annotations

from typing import Any


def put(tables: dict[str, Any], names: tuple[str, ...], value: object) -> None:
    """Set the value at nested names, with the tables on the way to it. A table that is written as a whole stays."""
    for name in names[:-1]:
        inner = tables.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        tables = inner
    tables[names[-1]] = value
