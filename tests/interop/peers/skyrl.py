"""Reads the settings of an unpacked wheel of SkyRL, or of a checkout: `python -m tests.interop.peers.skyrl FOLDER`.

The trees are dataclasses. Their defaults are read from the source, so that neither SkyRL nor what it imports is needed.
What SkyRL computes from other settings when it builds a tree is not among them.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOTS = {"rl": ("config.py", "SkyRLTrainConfig"), "sft": ("sft_config.py", "SFTConfig")}
"""Kind of run -> file and class of its tree."""

FOLDER = "skyrl/train/config"
ENVIRONMENTS = ("skyrl-gym/skyrl_gym/envs/search/env.py", "skyrl-gym/skyrl_gym/envs/sql/env.py")
"""Files with tables that environments bring."""

_PASSED_ON = ("deepcopy", "expanduser")
"""Functions of one argument that change nothing here: a folder is recorded with its `~`."""


class Source:
    """Classes and constants of several files, by name."""

    def __init__(self, files: Iterable[Path]) -> None:
        bodies = [ast.parse(file.read_text("utf-8")).body for file in files if file.exists()]
        statements = [statement for body in bodies for statement in body]
        self.classes = {statement.name: statement for statement in statements if isinstance(statement, ast.ClassDef)}
        self.constants = {
            target.id: statement.value
            for statement in statements
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }

    def instance(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a dataclass with their defaults, or with the values given."""
        fields: dict[str, Any] = {}
        for base in self.classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                fields |= self.instance(base.id, {})
        for statement in self.classes[name].body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = None if statement.value is None else self.value(statement.value)
        return {**fields, **values}

    def value(self, node: ast.expr) -> Any:
        """The value of an expression. Raises ValueError for one that only Python can compute."""
        match node:
            case ast.Lambda(body=body):
                return self.value(body)
            case ast.Name(id=name) if name in self.constants:
                return self.value(self.constants[name])
            case ast.Name(id=name) if name in self.classes:
                return self.instance(name, {})
            case ast.Name(id=("dict" | "list") as name):
                return {} if name == "dict" else []
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in self.classes:
                return self._member(name, attr)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                kwargs = {str(keyword.arg): keyword.value for keyword in keywords}
                return self._called(ast.unparse(function).rpartition(".")[2], arguments, kwargs)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case _:
                return ast.literal_eval(node)

    def _member(self, name: str, attr: str) -> Any:
        """The value of an enumeration's member."""
        for statement in self.classes[name].body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == attr:
                return self.value(statement.value)
        raise ValueError(f"{name}.{attr} is no member of an enumeration")

    def _called(self, function: str, arguments: list[ast.expr], kwargs: Mapping[str, ast.expr]) -> Any:
        if function == "field":
            return self.value(kwargs.get("default") or kwargs["default_factory"])
        if function in self.classes:
            return self.instance(function, {name: self.value(value) for name, value in kwargs.items()})
        if function in _PASSED_ON:
            return self.value(arguments[0])
        if function == "get":  # os.environ.get(NAME, DEFAULT)
            return self.value(arguments[1])
        if function == "join":  # os.path.join
            return "/".join(self.value(argument) for argument in arguments)
        raise ValueError(f"{function}(...) is computed by SkyRL")


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values; an empty table is a value."""
    leaves: dict[str, Any] = {}
    for name, value in table.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return leaves


def trees_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Kind of run -> source and defaults."""
    files = [folder / FOLDER / name for name, _ in ROOTS.values()]
    source = Source([*files, *(folder / name for name in ENVIRONMENTS)])
    return {
        kind: {"source": f"{FOLDER}/{file}", "defaults": flat(source.instance(root, {}))}
        for kind, (file, root) in ROOTS.items()
        if root in source.classes
    }


if __name__ == "__main__":
    print(json.dumps(trees_in(Path(sys.argv[1]))))
