"""Digests of the source of a user's own code: files of the rewards, environments, losses and estimators of a run.

They are stored in the run's `config.json`, and compared when the run resumes, by `skyrl config diff` and by `bisect`.
Files are read as text; nothing is imported.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.errors import Problem
from skyrl.tree import get_at
from skyrl.tree.code_names import OF_PROGRAM, source_of_program
from skyrl.tree.files import stored_file, stored_text
from skyrl.tree.python_source import parsed_program

Digests = Mapping[str, str]
"""sha256 of each file, keyed by the field that names the code and the file's path relative to the named file's folder:
`environment.env_class: reward.py`."""

IMPORTED = (
    "environment.env_class",
    "environment.skyrl_gym.mcp.reward",
    "environment.agent.function",
    "trainer.fully_async.accept",
    "data.curriculum.sampler",
    "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.policy_loss_type",
    "trainer.callbacks",
    "trainer.logger",
    "curriculum.sampler",
    "loss_type",
    "callbacks",
    "logger",
)
"""Fields whose import path is followed when a run starts: of reinforcement learning, then of supervised runs."""

_MOST = 200
"""Maximum number of files followed from one import path."""


def code_digests(run: RunConfig) -> dict[str, str]:
    """Digests of every file that an import path of the run names, and of the files that those import from their own
    folder or package. A file that cannot be read has no digest: importing it reports why. What is defined in the
    program or notebook that runs has the digest of its own source.
    """
    digests: dict[str, str] = {}
    for field in IMPORTED:
        for name in imported_by(value_at(run, field)):
            if name.startswith(OF_PROGRAM):
                source = source_of_program(name)
                digests[f"{field}: {name}"] = sha256(source.encode()).hexdigest() if source else ""
                continue
            root, files = _sources(name.rpartition(":")[0])
            digests |= {f"{field}: {file.relative_to(root).as_posix()}": _digest(file) for file in files}
    return digests


def imported_by(value: object) -> list[str]:
    """The import paths in the value of such a field: one name, or a list of names."""
    names = value if isinstance(value, tuple) else (value,)
    return [name for name in names if isinstance(name, str) and is_import_path(name)]


def value_at(run: RunConfig, path: str) -> Any:
    """The value of a field; None for a path that this kind of run does not have."""
    try:
        return get_at(run, path)
    except AttributeError:
        return None


def unimported_code(run: RunConfig) -> Iterator[Problem]:
    """A warning for each import path of the run, which is looked up as a file and not followed."""
    for field in IMPORTED:
        for name in imported_by(value_at(run, field)):
            file = source_file(name.rpartition(":")[0])
            location = f"it is in {file}" if file else "no file of it was found from this working directory"
            yield Problem(path=field, message=f"not checked: {name} is not imported; {location}", severity="warning")


def stored_digests(name: str) -> dict[str, str]:
    """The digests in the `config.json` of a run's folder; empty if it has none, as in earlier versions."""
    try:
        stored = json.loads(stored_text(Path(stored_file(name)).expanduser()))["code"]
        return {str(file): str(digest) for file, digest in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def changed_code(before: Digests, now: Digests) -> dict[str, tuple[str | None, str | None]]:
    """Files whose digests differ, each with both digests shortened; empty if either side has no digests at all."""
    if not before or not now:
        return {}
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return {name: (_short(before.get(name)), _short(now.get(name))) for name in names}


def _sources(where: str) -> tuple[Path, list[Path]]:
    """A folder, and the files below it: the named one, and those that it imports from there, directly or indirectly."""
    first = source_file(where)
    if first is None:
        return Path(), []
    package = None if where.endswith(".py") else where.partition(".")[0]
    root = first.parents[where.count(".") + (first.name == "__init__.py")] if package else first.parent
    files, waiting = [first], [first]
    while waiting and len(files) < _MOST:
        file = waiting.pop()
        new = [item for item in _imports(file, root, package) if item not in files]
        files += dict.fromkeys(new)
        waiting += dict.fromkeys(new)
    return root, sorted(files)


def source_file(where: str) -> Path | None:
    """The source file of a module or file that an import path names; None if there is none."""
    if where.endswith(".py"):
        files = [Path(where).expanduser().absolute()]
    else:  # searched for as imports do, with the working directory last
        top, *rest = where.split(".")
        spec = PathFinder.find_spec(top, [*sys.path, os.getcwd()])
        if spec is None or spec.origin is None:
            return None
        files = _files_of(Path(spec.origin).parent.joinpath(*rest) if rest else Path(spec.origin).with_suffix(""))
    return next((file for file in files if file.is_file()), None)


def _files_of(module: Path) -> list[Path]:
    return [module.with_suffix(".py"), module / "__init__.py"]


def _imports(file: Path, root: Path, package: str | None) -> Iterator[Path]:
    """Files below `root` that a file imports; for a file in a package, only those of that package."""
    try:
        tree = parsed_program(file.read_bytes())
    except (OSError, SyntaxError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                modules = [(root, name.name) for name in node.names]
            case ast.ImportFrom():
                base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
                start = node.module or ""
                modules = [(base, start), *((base, f"{start}.{alias.name}".lstrip(".")) for alias in node.names)]
            case _:
                continue
        for base, module in modules:
            for item in _files_of(base.joinpath(*module.split("."))):
                inside = item.is_relative_to(root / package if package else root)
                if module and inside and item.is_file():
                    yield item


def _digest(file: Path) -> str:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _short(digest: str | None) -> str | None:
    return digest and digest[:12]
