"""Regular expressions of skyrl take time linear in the text: what a model prints could hold the interpreter otherwise.

All are found in the source, with the way in which each is used: for the whole text, from its beginning, or searched.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from attrs import frozen

from tests.growth import growth

SKYRL = Path(__file__).parents[1] / "skyrl"
USES = ("fullmatch", "match", "search", "sub", "subn", "split", "findall", "finditer")
TRUSTED: Mapping[str, str] = {
    "cli/command_line/extras.py _REQUIREMENT": "reads the metadata of skyrl's own installation",
    "envs/builtin/code.py _BLOCK": "is linear: three quotes that could begin another block end this one",
    "tracking/source_labels.py _UNSAFE": "is linear: dots are tried only where a part of the path begins",
    "tree/arguments.py names": "reads a path that _PATH has matched as a whole, of at most MOST_BYTES",
    "tree/toml_lines.py _PART": "reads a key that _KEY has matched as a whole",
    "tree/toml_lines.py _TOKEN": "reads a text that tomllib has read: every string ends",
}
"""Expressions that look as if they took longer, by place, with the reason why they do not."""


@frozen
class Expression:
    """One expression, and how it is used."""

    place: str
    pattern: str
    flags: int
    uses: frozenset[str]

    def growth(self) -> str:
        results = [
            growth(self.pattern, self.flags, searched=use not in ("fullmatch", "match"), full_match=use == "fullmatch")
            for use in sorted(self.uses or {"search"})
        ]
        return next(filter(None, results), "")


class _Module:
    """A module's expressions. What a pattern takes from elsewhere counts as a word."""

    def __init__(self, file: Path) -> None:
        self.name = str(file.relative_to(SKYRL))
        self.nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        self.constants: dict[str, ast.expr] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.constants.setdefault(node.targets[0].id, node.value)

    def text(self, node: ast.expr, depth: int = 0) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(map(self.text, parts))
            case ast.FormattedValue(value=inner):
                return self.text(inner, depth)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self.text(left, depth) + self.text(right, depth)
            case ast.IfExp(body=body):
                return self.text(body, depth)
            case ast.Call(func=ast.Attribute(value=text, attr="format")):
                return self.text(text, depth)
            case ast.Name(id=name) if name in self.constants and depth < 5:
                return self.text(self.constants[name], depth + 1)
        return "word"

    def flags(self, call: ast.Call, at: int) -> int:
        arguments = [*call.args[at:], *(keyword.value for keyword in call.keywords if keyword.arg == "flags")]
        names = {node.attr for argument in arguments for node in ast.walk(argument) if isinstance(node, ast.Attribute)}
        return sum(int(getattr(re, name)) for name in names & {"ASCII", "IGNORECASE", "DOTALL", "MULTILINE", "VERBOSE"})

    def calls(self) -> Iterator[tuple[str, ast.Call, str]]:
        """Function of `re`, its call, and the name that a compiled expression gets."""
        named = {
            id(node.value): node.targets[0].id if isinstance(node.targets[0], ast.Name) else node.targets[0].attr
            for node in self.nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Attribute)
        }
        for node in self.nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=function)) if function != "escape":
                    yield function, node, named.get(id(node), "")

    def used(self) -> Iterator[tuple[str, str]]:
        """Names whose methods are called, or passed on, and the methods."""
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr in USES:
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name and name != "re":
                    yield name, node.attr


@cache
def all_expressions() -> tuple[Expression, ...]:
    """Every expression of skyrl."""
    may_use = re.compile(rf"^import re$|\.({'|'.join(set(USES) - {'split', 'sub'})})\b", re.MULTILINE)
    files = (file for file in sorted(SKYRL.rglob("*.py")) if may_use.search(file.read_text(encoding="utf-8")))
    modules = [_Module(file) for file in files]
    uses: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name, use in module.used():
            uses[name if not name.startswith("_") else f"{module.name}:{name}"].add(use)
    expressions = []
    for module in modules:
        for function, call, name in module.calls():
            if function in ("Pattern", "Match", "error"):
                continue
            compiled = function == "compile"
            key = name if not name.startswith("_") else f"{module.name}:{name}"
            flags = module.flags(call, {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(function, 2))
            used = frozenset(uses[key] if compiled else {function})
            pattern = module.text(call.args[0])
            expressions.append(Expression(f"{module.name} {name or pattern}", pattern, flags, used))
    return tuple(expressions)


def test_every_expression_takes_time_linear_in_the_text() -> None:
    growths = {expression.place: expression.growth() for expression in all_expressions()}
    assert len(growths) > 100
    assert {location: reason for location, reason in growths.items() if reason and location not in TRUSTED} == {}
    assert [location for location in TRUSTED if not growths.get(location)] == []


LINEAR = {
    r"\d+(\.\d*)?": "fullmatch",
    r"\d+": "search",
    r"x*(.*)": "match",
    r"answer\s*:\s*([^\n<]+)": "search",
    r"(?<=://)[^\s/@]+(?=@)": "search",
    r"\d++\d*x": "match",
    r"(a+)+": "match",
    r"^a+$": "search",
    r"\{[^}{]*\}": "search",
    r"\{[^}]{0,20}\}": "search",
}
SLOWER = {
    r"\d+\.?\d*": "fullmatch",
    r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>": "match",
    r"\s+$": "search",
    r"(a*)*b": "match",
    r"(a|a)*b": "match",
    r"(a+)+$": "match",
    r".*a.*b": "match",
    r"\{[^}]*\}": "search",
    r"\d+x": "search",
    r"(?=\s*x)\s*y": "search",
}


@pytest.mark.parametrize(("pattern", "use"), [*LINEAR.items(), *SLOWER.items()])
def test_expressions_whose_time_is_known_are_told_apart(pattern: str, use: str) -> None:
    result = Expression("", pattern, 0, frozenset({use})).growth()
    assert bool(result) == (pattern in SLOWER), result


@pytest.mark.long
def test_the_patterns_and_uses_of_a_module_are_found() -> None:
    expressions = {expression.place: expression for expression in all_expressions()}
    number = expressions["envs/builtin/program_tests.py _NUMBER"]
    assert number.pattern.startswith("[+-]?")
    assert (number.flags, set(number.uses)) == (int(re.ASCII), {"fullmatch"})
    assert expressions["tree/toml_lines.py _HEADER"].pattern.count("A-Za-z0-9_-") == 2
    assert expressions["chats/rendering.py marks"].flags == re.IGNORECASE
