"""Imports user objects by path: `module:Name` from an importable module, `path/to/file.py:Name` from a file.

Pass only names from the user's own files or arguments. The working directory is searched for modules, too, and a file
is imported only once, however often it is named.
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl.errors import ConfigError, Problem, UserError
from skyrl.tree.classes import assembled, class_name, fields_of, known_class
from skyrl.tree.frames import described, raised_at
from skyrl.tree.names import nearest


def import_object(name: str, error: type[UserError] = UserError) -> Any:
    """The object that an import path names. Raises `error`, which says what was searched for and where."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise error(f"{name!r} is not an import path: write module:name or file.py:name")
    try:
        found: Any = _from_file(Path(where).expanduser()) if where.endswith(".py") else _from_module(where)
    except (Exception, SystemExit) as failure:  # a user's module may raise anything while it is imported
        raise error(_why(where, failure)) from failure
    for each in attribute.split("."):
        if not hasattr(found, each):
            near = nearest(each, [name for name in dir(found) if not name.startswith("_")])
            raise error(f"{where} has no {attribute!r}" + (f"; did you mean {near}?" if near else ""))
        found = getattr(found, each)
    return found


def import_class(name: str) -> type[Any] | None:
    """The configuration class that an import path names; None if it names something else. Raises `ConfigError` if the
    import fails.
    """
    if ":" not in name:
        return None
    try:
        found = import_object(name)
    except UserError as error:
        raise ConfigError([Problem(path="", message=str(error))]) from error
    if isinstance(found, type) and "__attrs_attrs__" not in vars(found) and hasattr(found, "__configuration__"):
        message = f"{found.__qualname__} lacks the decorator @frozen: its own fields would be ignored"
        raise ConfigError([Problem(path="", message=message)])
    return found if isinstance(found, type) and known_class(class_name(found)) is found else None


def _from_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that nothing in the folder shadows an installed package
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(path)
    file = path.resolve()
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("it cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    for value in vars(module).values():
        made = known_class(class_name(value)) if isinstance(value, type) and value.__module__ == name else None
        if made is not None:
            copyreg.pickle(made, _taken_apart)  # another process finds the file, not the module
    return module


def _module_name(file: Path) -> str:
    """Module name derived from the file name, since stored classes refer to it; a second file of the same name gets a
    longer one.
    """
    name = f"skyrl_user_{file.stem}"
    if name not in sys.modules or sys.modules[name].__file__ == str(file):
        return name
    from hashlib import sha256

    return f"{name}_{sha256(str(file).encode()).hexdigest()[:8]}"


def _why(where: str, failure: BaseException) -> str:
    match failure:
        case FileNotFoundError() if where.endswith(".py") and not Path(where).expanduser().is_file():
            return f"there is no file {where} (relative paths start at the working directory)"
        case ModuleNotFoundError() if place := raised_at(failure):
            return f"{place.partition(',')[0]} imports the module {failure.name}, which cannot be found: install it"
        case ModuleNotFoundError():
            return f"the module {failure.name} cannot be found; install it, or give a file: path/to/file.py:name"
        case _:
            return f"importing {where} failed: {described(failure)}"


def _taken_apart(config: object) -> tuple[Any, ...]:
    cls = type(config)
    file = sys.modules[cls.__module__].__file__
    return _put_together, (f"{file}:{cls.__qualname__}", {name: getattr(config, name) for name in fields_of(cls)})


def _put_together(name: str, values: dict[str, Any]) -> object:
    cls = import_class(name)
    if cls is None:
        raise ConfigError([Problem(path=name, message="is no longer a configuration class")])
    return assembled(cls(), values)
