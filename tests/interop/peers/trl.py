"""Reads the arguments of TRL's commands and their defaults from an unpacked wheel; nothing of it is imported.

`TrainingArguments` is that of the wheel of transformers in the same folder, else of the installed transformers. With a
checkout of open-r1 in the folder as `open_r1`, the arguments that its programs add are read, too.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COMMANDS = {
    "grpo": ("GRPOScriptArguments", "GRPOConfig"),
    "rloo": ("RLOOScriptArguments", "RLOOConfig"),
    "sft": ("ScriptArguments", "SFTConfig"),
    "reward": ("ScriptArguments", "RewardConfig"),
    "dpo": ("ScriptArguments", "DPOConfig"),
    "kto": ("ScriptArguments", "KTOConfig"),
    "distillation": ("DistillationScriptArguments", "DistillationConfig"),
    "gkd": ("ScriptArguments", "GKDConfig"),
}
"""Command -> its own classes of arguments; every command also has those of `SHARED`."""

_SOURCES = {"gkd": "trl/experimental/gkd/gkd_config.py"}
"""Kind of run -> its file, where that is not beside the others."""

SHARED = ("ModelConfig", "DatasetMixtureConfig")
MODULES = ("scripts/*.py", "trainer/*_config.py", "experimental/gkd/*_config.py")
ASIDE = ("vllm_serve",)
"""Scripts that train nothing, whose classes have the names of others."""


Classes = Mapping[str, ast.ClassDef]


def classes_of(files: Iterable[Path]) -> dict[str, ast.ClassDef]:
    """The classes of some files by name."""
    trees = [ast.parse(file.read_text("utf-8")) for file in files]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def defaults_of(name: str, classes: Classes, of_trl: Classes) -> dict[str, Any]:
    """Field -> default of a dataclass and of its bases, of which `trl.NAME` are in `of_trl`."""
    defaults: dict[str, Any] = {}
    for base in map(ast.unparse, classes[name].bases):
        known = of_trl if base.startswith("trl.") else classes
        defaults |= defaults_of(base.removeprefix("trl."), known, of_trl) if base.removeprefix("trl.") in known else {}
    return defaults | dict(_own(classes[name]))


def _own(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    constants = {
        target.id: statement.value
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        field, value = statement.target.id, statement.value
        if field.startswith("_") or "ClassVar" in ast.unparse(statement.annotation):
            continue
        if isinstance(value, ast.Call):
            kwargs = {word.arg: word.value for word in value.keywords}
            value = kwargs.get("default") or kwargs.get("default_factory")
        yield field, _value(constants.get(value.id, value) if isinstance(value, ast.Name) else value)


def _value(node: ast.expr | None) -> Any:
    """The constant, or what a factory of constants makes; null for what only the program can compute."""
    match node:
        case ast.Lambda(body=body):
            return _value(body)
        case ast.Name(id="list"):
            return []
        case ast.Name(id="dict"):
            return {}
        case None:
            return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def trees(folder: Path) -> dict[str, dict[str, Any]]:
    """Kind of run -> the file with its arguments, and its arguments with their defaults."""
    arguments = folder / "transformers" / "training_args.py"
    installed = find_spec("transformers")
    if not arguments.is_file() and installed and installed.origin:
        arguments = Path(installed.origin).with_name("training_args.py")
    modules = [file for pattern in MODULES for file in sorted((folder / "trl").glob(pattern)) if file.stem not in ASIDE]
    classes = classes_of([arguments, *modules])
    tree_by_kind = {
        kind: _tree(_SOURCES.get(kind, f"trl/trainer/{kind}_config.py"), (*own, *SHARED), classes, classes)
        for kind, own in COMMANDS.items()
        if own[-1] in classes
    }
    added = folder / "open_r1" / "src" / "open_r1" / "configs.py"
    if added.is_file():
        recipes = classes | classes_of([added])
        for kind in ("grpo", "sft"):
            tree_by_kind[f"open_r1_{kind}"] = _tree(
                "src/open_r1/configs.py", (*COMMANDS[kind], "ModelConfig"), recipes, classes
            )
    return tree_by_kind


def _tree(source: str, names: Iterable[str], classes: Classes, of_trl: Classes) -> dict[str, Any]:
    known = [defaults_of(name, classes, of_trl) for name in names if name in classes]
    return {"source": source, "defaults": {key: value for defaults in known for key, value in defaults.items()}}


if __name__ == "__main__":
    print(json.dumps(trees(Path(sys.argv[1]))))
