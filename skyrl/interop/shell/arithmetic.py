"""Evaluates the sums of a shell script, `$((1024 * 2))` and `((i < 4))`."""

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
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_DEEPEST = 20
"""Deepest nesting of variables within variables that is resolved."""

_LONGEST = 500
"""Largest number of characters in one sum."""


def calculated(expression: str, value_of: Callable[[str], str], depth: int = 0) -> int | None:
    """The value of a sum as a shell computes it; None for other operators, and for variables that are not numbers.
    `value_of` gives the text of a variable, empty for one that is not set; `depth` counts variables within variables.
    """
    text = expression.strip() or "0"
    if depth > _DEEPEST or len(text) > _LONGEST:
        return None
    choice = re.fullmatch(r"([^?]+)\?([^?:]+):([^?:]+)", text)
    if choice:
        condition = calculated(choice[1], value_of, depth + 1)
        return None if condition is None else calculated(choice[2 if condition else 3], value_of, depth + 1)
    try:
        return _evaluate(parsed_expression(_python_expression(text)), value_of, depth)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _python_expression(text: str) -> str:
    """The expression with the shell's operators in Python's words, and its octal numbers in Python's form."""
    text = text.replace("&&", " and ").replace("||", " or ").replace("\n", " ").replace("//", " invalid invalid ")
    text = re.sub(r"(?<![\w.])0(?=[0-7]+\b)", "0o", text)
    return re.sub(r"!(?!=)", " not ", text)


def _evaluate(node: ast.expr, value_of: Callable[[str], str], depth: int) -> int | None:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return calculated(value_of(name), value_of, depth + 1)
        case ast.UnaryOp(op=op, operand=operand):
            value = _evaluate(operand, value_of, depth)
            if value is None:
                return None
            return {ast.USub: -value, ast.UAdd: value, ast.Not: int(not value), ast.Invert: ~value}[type(op)]
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _evaluate(left, value_of, depth), _evaluate(right, value_of, depth)
            return None if one is None or other is None else _combined(one, op, other)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            one, other = _evaluate(left, value_of, depth), _evaluate(right, value_of, depth)
            return None if one is None or other is None else int(_COMPARISONS[type(op)](one, other))
        case ast.BoolOp(op=op, values=values):
            results = [_evaluate(item, value_of, depth) for item in values]
            if None in results:
                return None
            return int(all(results) if isinstance(op, ast.And) else any(results))
    return None


def _combined(one: int, op: ast.operator, other: int) -> int | None:
    """The result as a shell computes it, with division rounding towards zero; None if there is none."""
    if type(op) in _OPERATIONS:
        value = _OPERATIONS[type(op)](one, other)
    elif isinstance(op, ast.Div) and other:
        value = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    elif isinstance(op, ast.Mod) and other:
        value = abs(one) % abs(other) * (1 if one >= 0 else -1)
    elif isinstance(op, ast.Pow) and 0 <= other < 64 and abs(one) < 2**16:
        value = one**other
    elif isinstance(op, ast.LShift) and 0 <= other < 63 and abs(one) < 2**62:
        value = one << other
    elif isinstance(op, ast.RShift) and 0 <= other < 64:
        value = one >> other
    else:
        return None
    return value if abs(value) < 2**63 else None
