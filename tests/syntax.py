"""Syntax trees of the project's modules, parsed once for all tests that read them: those of the group "house"."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    """The tree of a module, which its readers leave as it is."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Every node of that tree, in the order of `ast.walk`, which takes ten times as long as reading this."""
    return tuple(ast.walk(tree_of(file)))
