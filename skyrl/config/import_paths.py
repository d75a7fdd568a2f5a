"""Things of the user's own, by import path: `my_pkg.losses:MyLoss` from an importable module, `losses.py:MyLoss` from
a file.

Give it only names that stand in the user's own files or arguments. Nothing here is imported before a run asks for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl.errors import ConfigError, Problem, UserError
from skyrl.tree import thaw
from skyrl.tree.classes import docs_of, fields_of, is_config
from skyrl.tree.draft import structure

_SPELLING = "module:name or file.py:name, of a class or a function"


def is_import_path(name: str) -> bool:
    """Does the name say where it is to be imported from?"""
    return ":" in name


def import_object(name: str, error: type[UserError] = UserError) -> Any:
    """What the import path names. Raises `error`, which says what was looked for and where."""
    where, _, attribute = name.rpartition(":")
    module = _load_file(Path(where).expanduser(), error) if where.endswith(".py") else _load_module(where, error)
    if not hasattr(module, attribute):
        raise error(f"{where} has no {attribute!r}")
    return getattr(module, attribute)


def absolute(name: str) -> str:
    """The same import path, good from any folder."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).expanduser().absolute()}:{attribute}" if where.endswith(".py") else name


def build(name: str, settings: Mapping[str, Any], *, field: str, table: str) -> Any:
    """The object that import path `name` stands for: an instance of a class, made from `settings`, or a function.

    `field` and `table` are the dotted paths that name and settings are written at. Raises `ConfigError` for what cannot
    be imported or called, and for every setting that the class has not, or does not take.
    """
    try:
        found = import_object(name)
    except UserError as error:
        raise ConfigError([Problem(path=field, message=str(error), hint=_SPELLING)]) from error
    if not callable(found):
        raise ConfigError([Problem(path=field, message=f"{name} is not a class or function", hint=_SPELLING)])
    if is_config(found):
        return _instance(found, settings, table)
    if settings:
        hint = "make it a class, decorated with skyrl.tree.frozen, whose fields are the settings"
        raise ConfigError([Problem(path=table, message=f"{name} takes no settings", hint=hint)])
    return found() if isinstance(found, type) else found


def _instance(cls: type[Any], settings: Mapping[str, Any], table: str) -> Any:
    try:
        return structure(thaw(settings), cls)
    except ConfigError as error:
        docs = docs_of(cls)
        raise ConfigError(
            [
                Problem(
                    path=f"{table}.{each.path}",
                    message=each.message,
                    hint=each.hint or docs.get(each.path, "") or f"its fields: {', '.join(fields_of(cls))}",
                )
                for each in error.problems
            ]
        ) from error


def _load_module(name: str, error: type[UserError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise error(
            f"the module {missing.name} cannot be found; install it, or name a file: path/to/file.py:name"
        ) from missing
    except (Exception, SystemExit) as failure:
        raise error(f"importing {name} failed: {type(failure).__name__}: {failure}") from failure


def _load_file(path: Path, error: type[UserError]) -> ModuleType:
    if not path.is_file():
        raise error(f"there is no file {path} (relative paths start at the folder the command runs in)")
    unique = f"skyrl_user_{path.stem}_{sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise error(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as failure:
        del sys.modules[unique]
        raise error(f"importing {path} failed: {type(failure).__name__}: {failure}") from failure
    return module


class Imported:
    """An object of the user's own that can be sent to another process: it is built anew there, from its import path."""

    def __init__(self, name: str, settings: Mapping[str, Any], *, field: str, table: str) -> None:
        """As `build`."""
        self._recipe = (absolute(name), settings, field, table)
        self.object = build(name, settings, field=field, table=table)

    def __call__(self, *inputs: Any) -> Any:
        return self.object(*inputs)

    def __getattr__(self, name: str) -> Any:
        if name in ("object", "_recipe"):
            raise AttributeError(name)
        return getattr(self.object, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self._recipe


def _again(name: str, settings: Mapping[str, Any], field: str, table: str) -> Imported:
    return Imported(name, settings, field=field, table=table)
