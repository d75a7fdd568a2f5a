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
        self.classes = {each.name: each for each in statements if isinstance(each, ast.ClassDef)}
        self.constants = {
            target.id: each.value
            for each in statements
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }

    def instance(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a dataclass with their defaults, or with the values given."""
        found: dict[str, Any] = {}
        for base in self.classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                found |= self.instance(base.id, {})
        for each in self.classes[name].body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                found[each.target.id] = None if each.value is None else self.value(each.value)
        return {**found, **given}

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
                given = {str(each.arg): each.value for each in keywords}
                return self._called(ast.unparse(function).rpartition(".")[2], arguments, given)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case _:
                return ast.literal_eval(node)

    def _member(self, name: str, attr: str) -> Any:
        """The value of an enumeration's member."""
        for each in self.classes[name].body:
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == attr:
                return self.value(each.value)
        raise ValueError(f"{name}.{attr} is no member of an enumeration")

    def _called(self, function: str, arguments: list[ast.expr], given: Mapping[str, ast.expr]) -> Any:
        if function == "field":
            return self.value(given.get("default") or given["default_factory"])
        if function in self.classes:
            return self.instance(function, {name: self.value(value) for name, value in given.items()})
        if function in _PASSED_ON:
            return self.value(arguments[0])
        if function == "get":  # os.environ.get(NAME, DEFAULT)
            return self.value(arguments[1])
        if function == "join":  # os.path.join
            return "/".join(self.value(argument) for argument in arguments)
        raise ValueError(f"{function}(...) is computed by SkyRL")


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values; an empty table is a value."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return found


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
