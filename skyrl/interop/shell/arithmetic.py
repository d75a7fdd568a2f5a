"""Evaluates the sums of a shell script, `$((1024 * 2))`, as far as the script itself determines their values."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from skyrl.tree.python_source import parsed_expression

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_DEEPEST = 20
"""Deepest nesting of variables within variables that is resolved."""

_LONGEST = 200
"""Largest number of characters in one sum, and of digits in its result."""


def calculated(line: str, variables: dict[str, str]) -> str:
    """`line` with each sum replaced by its value. A sum with other operators or unknown variables is left unchanged."""
    position = 0
    while (start := line.find("$((", position)) >= 0:
        end = _end(line, start)
        if end < 0:
            break
        value = _value(line[start + 3 : end - 2], variables)
        position = end if value is None else start
        if value is not None:
            line = line[:start] + str(value) + line[end:]
    return line


def _end(line: str, start: int) -> int:
    """Position after the parentheses that close the sum; -1 if there are none."""
    depth = 0
    for found in re.finditer(r"[()]", line[start : start + _LONGEST]):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return start + found.end()
    return -1


def _value(text: str, variables: dict[str, str], depth: int = 0) -> int | None:
    plain = _VARIABLE.sub(r"\1", text).strip()
    if depth > _DEEPEST or len(plain) > _LONGEST:
        return None
    try:
        return _of(parsed_expression(plain), variables, depth)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _of(node: ast.expr, variables: dict[str, str], depth: int) -> int | None:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return _value(variables.get(name, ""), variables, depth + 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _of(operand, variables, depth)
            return None if value is None else -value
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _of(left, variables, depth), _of(right, variables, depth)
            return None if one is None or other is None else _combined(one, op, other)
    return None


def _combined(one: int, op: ast.operator, other: int) -> int | None:
    """The result as a shell computes it, with division rounding towards zero; None if there is none."""
    if type(op) in _OPERATIONS:
        value = _OPERATIONS[type(op)](one, other)
    elif isinstance(op, ast.FloorDiv | ast.Div) and other:
        value = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    elif isinstance(op, ast.Mod) and other:
        value = abs(one) % abs(other) * (1 if one >= 0 else -1)
    else:
        return None
    return value if abs(value) < 2**63 else None
