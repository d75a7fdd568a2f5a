"""Objects by import path: `module:Name`, or `path/to/file.py:Name`."""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl.errors import ConfigError, Problem
from skyrl.tree.classes import class_name, fields_of, known_class


def import_class(name: str) -> type[Any] | None:
    """The configuration class that an import path names; None if what it names is none.

    Raises `ConfigError` if the import fails.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        return None
    found: Any = import_module(where)
    for each in attribute.split("."):
        found = getattr(found, each, None)
    if isinstance(found, type) and "__attrs_attrs__" not in vars(found) and hasattr(found, "__configuration__"):
        message = f"{attribute} lacks the decorator @frozen: its own fields would be ignored"
        raise ConfigError([Problem(path="", message=message)])
    is_ours = isinstance(found, type) and known_class(f"{found.__module__}:{found.__qualname__}") is found
    return found if is_ours else None


def import_module(where: str) -> ModuleType:
    """A module by its name, or a file, each imported once. Modules are looked for in the folder that the command runs
    in, too. Raises `ConfigError`, whatever goes wrong in a user's module.
    """
    try:
        return _from_file(Path(where).expanduser()) if where.endswith(".py") else _from_module(where)
    except ConfigError:
        raise
    except ModuleNotFoundError as missing:
        why = f"the module {missing.name} cannot be found; install it, or name a file: path/to/file.py:name"
        raise ConfigError([Problem(path="", message=why)]) from missing
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        why = f"importing {where} failed: {type(error).__name__}: {error}"
        raise ConfigError([Problem(path="", message=why)]) from error


_FILES: dict[Path, ModuleType] = {}
"""Files that were imported, whatever other files of the same name there are."""

_HOMES: dict[type[Any], Path] = {}
"""Where a configuration class of a file comes from."""


def _from_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: nothing of the folder takes the place of an installed package
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        why = f"there is no file {path} (relative paths start at the folder the command runs in)"
        raise ConfigError([Problem(path="", message=why)])
    resolved = path.resolve()
    if resolved in _FILES:
        return _FILES[resolved]
    name = f"skyrl_user_{resolved.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigError([Problem(path="", message=f"{path} cannot be imported as Python")])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _FILES[resolved] = module
    for value in vars(module).values():
        made = known_class(class_name(value)) if isinstance(value, type) and value.__module__ == name else None
        if made is not None:
            _HOMES[made] = resolved
            copyreg.pickle(made, _taken_apart)  # another process finds the file, not the module
    return module


def _taken_apart(config: Any) -> tuple[Any, ...]:
    cls = type(config)
    values = {name: getattr(config, name) for name in fields_of(cls)}
    return _put_together, (f"{_HOMES[cls]}:{cls.__qualname__}", values)


def _put_together(name: str, values: dict[str, Any]) -> Any:
    cls = import_class(name)
    if cls is None:
        raise ConfigError([Problem(path=name, message="is not a configuration class any more")])
    return cls(**values)
