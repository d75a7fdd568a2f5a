"""The documentation of a configuration class's fields: the string literal below each, as editors show it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any

from skyrl.tree.classes import is_config


def docs_of(cls: type[Any]) -> dict[str, str]:
    """Field name -> the string literal below the field, in one line; parent classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_config(base):
            docs |= _class_docs(base)
    return docs


@cache
def _class_docs(cls: type[Any]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # a class defined in an interactive session has no source
        return {}
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)).body
    return {
        above.target.id: " ".join(below.value.value.split())
        for above, below in pairwise(body)
        if isinstance(above, ast.AnnAssign)
        and isinstance(above.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
