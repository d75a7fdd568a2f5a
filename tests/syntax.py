"""Syntax trees of the project's modules, parsed once for all tests that read them: those of the group "house"."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    """The tree of a module, which its readers leave as it is."""
    return ast.parse(file.read_text(encoding="utf-8"))
