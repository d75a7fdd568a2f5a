"""Reads AReaL's settings and their defaults from its classes of arguments, without running them.

A table that is absent by default is null in a tree; the defaults of the settings that it would have follow it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

SOURCE = "areal/api/cli_args.py"
CONSTANTS = "areal/utils/constants.py"
KINDS = ("GRPOConfig", "SFTConfig", "RWConfig", "DPOConfig")


_CALLED = {
    "list": list,
    "dict": dict,
    "int": int,
    "get_user_tmp": lambda: None,
    "os": SimpleNamespace(getenv=lambda *_: None),
}
"""What expressions of defaults call; what depends on the machine is null."""


def default_of(value: ast.expr) -> ast.expr:
    """The expression of a field's default: for `field(...)` its argument, for a factory what it returns."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return value
    arguments = {keyword.arg: keyword.value for keyword in value.keywords}
    factory = arguments.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body
    return ast.Call(factory, [], []) if factory is not None else arguments.get("default", ast.Constant(None))


class Classes:
    """The dataclasses of a file."""

    def __init__(self, tree: ast.Module, constants: Mapping[str, object]) -> None:
        self.found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self._tables = {name for name, node in self.found.items() if "Enum" not in map(ast.unparse, node.bases)}
        self._names = {**_CALLED, **constants}

    def fields(self, name: str) -> dict[str, ast.AnnAssign]:
        """Name -> definition, those of base classes first."""
        node = self.found[name]
        fields: dict[str, ast.AnnAssign] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.found:
                fields |= self.fields(base.id)
        own = (statement for statement in node.body if isinstance(statement, ast.AnnAssign))
        settings = (statement for statement in own if "ClassVar" not in ast.unparse(statement.annotation))
        return fields | {ast.unparse(statement.target): statement for statement in settings}

    def settings(self, name: str, path: str, overrides: Mapping[str, ast.expr]) -> Iterator[tuple[str, object]]:
        """Dotted key and default of each setting. `overrides` are arguments of the class in place of its defaults."""
        for field, node in self.fields(name).items():
            annotated = ast.unparse(node.annotation).strip("'\"")
            table = next((word for word in re.findall(r"\w+", annotated) if word in self._tables), "")
            default = overrides.get(field, default_of(node.value or ast.Constant(None)))
            key = path + field
            if not table:
                yield key, self._value(default)
            elif annotated.startswith(("tuple[", "list[")):
                yield from self._rows(table, key, default)
            else:
                is_absent = isinstance(default, ast.Constant) and default.value is None
                yield from [(key, None)] if is_absent else []
                arguments = default.keywords if isinstance(default, ast.Call) else []
                yield from self.settings(
                    table, f"{key}.", {keyword.arg: keyword.value for keyword in arguments if keyword.arg}
                )

    def _rows(self, table: str, key: str, default: ast.expr) -> Iterator[tuple[str, object]]:
        """The settings of a list of tables, `key[0].name`; of its class if the list is empty by default."""
        rows = default.elts if isinstance(default, ast.Tuple | ast.List) else []
        for number, row in enumerate(rows or [ast.Call(ast.Name(table), [], [])]):
            arguments = row.keywords if isinstance(row, ast.Call) else []
            yield from self.settings(
                table, f"{key}[{number}].", {keyword.arg: keyword.value for keyword in arguments if keyword.arg}
            )

    def _value(self, node: ast.expr) -> object:
        """The value of a default; null for a setting that has to be given."""
        text = ast.unparse(node)
        if text == "MISSING":
            return None
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in self.found:  # a member of an enumeration
            members = self.found[ast.unparse(node.value)].body
            return next(
                ast.literal_eval(member.value)
                for member in members
                if isinstance(member, ast.Assign) and ast.unparse(member.targets[0]) == node.attr
            )
        return eval(
            compile(ast.fix_missing_locations(ast.Expression(node)), SOURCE, "eval"),
            {"__builtins__": {}, **self._names},
        )


def constants_of(file: Path) -> dict[str, object]:
    """The texts and numbers that a module and its classes name."""
    constants: dict[str, object] = {}
    members: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            member = ast.unparse(node.value).removesuffix(".value").rpartition(".")[2]
            if isinstance(node.value, ast.Constant):
                constants[name] = node.value.value
            elif ast.unparse(node.value).endswith(".value"):
                members.append((name, member))
    return constants | {name: constants[member] for name, member in members if member in constants}


def trees(folder: Path) -> dict[str, dict[str, object]]:
    """Kind of run -> source and defaults."""
    constants = constants_of(folder / CONSTANTS) | constants_of(folder / SOURCE)
    classes = Classes(ast.parse((folder / SOURCE).read_text()), constants)
    return {
        kind: {"source": SOURCE, "defaults": dict(classes.settings(kind, "", {}))}
        for kind in KINDS
        if kind in classes.found
    }


if __name__ == "__main__":
    print(json.dumps(trees(Path(sys.argv[1]))))
