"""Mutants of a module: each is the module with one operator, condition, number, flag or call changed.

    mutants_of(Path("skyrl/algorithms/kl.py"), "skyrl/algorithms/kl.py")  ->  one Mutant for each change
    mutant.code(path)                                                     ->  the module with that change, compiled

What a change to it would only be noticed by a reader is left alone: docstrings, messages, annotations, assertions.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from attrs import frozen

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
"""What takes the place of each operator."""

Change = tuple[str, Callable[[], None]]
"""What is changed, in words, and what changes it in the tree."""


@frozen(kw_only=True)
class Mutant:
    """One change of one module."""

    file: str
    """From the root of the project."""

    scope: str
    """The function or class that it is in, dotted; empty at the level of the module."""

    line: int
    last_line: int
    statement: int
    """First line of the statement that it is in: lines of a constant of several lines are never noted as run."""

    number: int
    """Place among the changes of its module."""

    what: str
    """The expression before and after, and which one it is where a scope has several."""

    @property
    def name(self) -> str:
        """Names it although lines above it move."""
        return f"{self.file}:{self.scope}: {self.what}"

    def code(self, path: Path) -> CodeType:
        """The module at `path` with this change, compiled."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        *_, (_, change) = list(_changes(tree))[self.number]
        change()
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


def mutants_of(path: Path, name: str) -> list[Mutant]:
    """Every mutant of the module at `path`, which is called `name`, in the order of the source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mutants: list[Mutant] = []
    times: Counter[tuple[str, str]] = Counter()
    for number, (node, scope, statement, (description, _)) in enumerate(_changes(tree)):
        times[scope, description] += 1
        suffix = f" (#{times[scope, description]})" if times[scope, description] > 1 else ""
        lines = {"line": node.lineno, "last_line": node.end_lineno or node.lineno, "statement": statement}
        mutants.append(Mutant(file=name, scope=scope, number=number, what=description + suffix, **lines))
    return mutants


def _changes(tree: ast.Module) -> Iterator[tuple[Any, str, int, Change]]:
    """Each node that can be changed with its scope, the first line of its statement, and the change. Nothing is changed
    while they are listed.
    """
    for node, scope, statement in _nodes(tree, "", 1):
        for change in _of_node(node):
            yield node, scope, statement, change


def _nodes(node: ast.AST, scope: str, statement: int) -> Iterator[tuple[ast.AST, str, int]]:
    """Depth first, without what only a reader notices."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}".lstrip(".")
    if isinstance(node, ast.stmt):
        statement = node.lineno
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_readers(child):
                yield child, scope, child.lineno if isinstance(child, ast.stmt) else statement
                yield from _nodes(child, scope, statement)


def _is_for_readers(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _of_node(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            yield from (_operator(node, node.ops, index) for index, op in enumerate(node.ops) if type(op) in _OTHER)
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in _OTHER:
            yield _replaced(node, "op", _OTHER[type(op)]())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.UnaryOp):
            yield _replaced(node, "test", ast.UnaryOp(op=ast.Not(), operand=test), attribute="test")
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            plus = operand if isinstance(node.op, ast.USub) else ast.Call(ast.Name("bool", ast.Load()), [operand], [])
            yield _swapped(node, plus)
        case ast.Constant(value=bool() as flag):
            yield _replaced(node, "value", not flag)
        case ast.Constant(value=int() | float() as number):
            yield _replaced(node, "value", number + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield _replaced(node, "value", ast.Constant(value=None))


def _operator(node: ast.Compare, operators: list[ast.cmpop], index: int) -> Change:
    before, other = ast.unparse(node), _OTHER[type(operators[index])]()
    kept, operators[index] = operators[index], other  # type: ignore[call-overload]  # lists of any operators
    after, operators[index] = ast.unparse(node), kept

    def change() -> None:
        operators[index] = other  # type: ignore[call-overload]  # lists of any operators

    return f"{before} -> {after}", change


def _replaced(node: Any, name: str, value: Any, *, attribute: str = "") -> Change:
    kept = getattr(node, name)
    before = ast.unparse(getattr(node, attribute) if attribute else node)
    setattr(node, name, value)
    after = ast.unparse(getattr(node, attribute) if attribute else node)
    setattr(node, name, kept)
    return f"{before} -> {after}", lambda: setattr(node, name, value)


def _swapped(node: Any, other: ast.AST) -> Change:
    """The whole node becomes another, in its place."""

    def change() -> None:
        node.__class__, node.__dict__ = type(other), {**other.__dict__, "lineno": node.lineno}

    return f"{ast.unparse(node)} -> {ast.unparse(other)}", change
