"""Python source of others, read as a syntax tree and never run.

Python's parser has errors of its own for null bytes, and for a few thousand brackets or signs in a row; here, whatever
is wrong with the source is a `SyntaxError`.
"""

from __future__ import annotations

import ast


def parsed_program(source: str | bytes) -> ast.Module:
    """The syntax tree of a program. Raises `SyntaxError`."""
    try:
        return ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "it is nested too deep") from None


def parsed_expression(source: str) -> ast.expr:
    """The syntax tree of an expression. Raises `SyntaxError`."""
    try:
        return ast.parse(source, mode="eval").body
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "it is nested too deep") from None
