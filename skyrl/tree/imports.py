"""Imports user objects by path: `module:Name` from an importable module, `path/to/file.py:Name` from a file.

Pass only names from the user's own files or arguments. The folder of a file and the working directory are searched for
modules, too, and a file is imported only once, however often it is named. `following` limits what a command that only
reads a configuration may import.
"""

from __future__ import annotations

import ast
import copyreg
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from skyrl.errors import ConfigError, Problem, UserError
from skyrl.tree.classes import assembled, class_name, fields_of, known_class
from skyrl.tree.frames import described, is_of_user, raised_at
from skyrl.tree.names import nearest
from skyrl.tree.python_source import parsed_program

Followed = Literal["all", "classes", "nothing"]
"""Import paths that are followed: all, those of the key `class`, whose fields a tree consists of, or none."""

_SHOWN = 8
"""Largest number of names of a module that are listed."""

_followed: ContextVar[Followed] = ContextVar("followed", default="all")


@contextmanager
def following(kind: Followed) -> Iterator[None]:
    """Context in which other import paths are not followed: whatever they name is unknown."""
    token = _followed.set(kind)
    try:
        yield
    finally:
        _followed.reset(token)


def follows(kind: Followed) -> bool:
    """Whether import paths of this kind are followed here."""
    return _followed.get() in ("all", kind)


def import_object(name: str, error: type[UserError] = UserError) -> Any:
    """The object that an import path names. Raises `error`, which says what was searched for and where."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise error(f"{name!r} is not an import path: write module:name or file.py:name")
    if not follows("all"):
        raise error(f"{name} is not imported: this command only reads the configuration")
    return _imported(where, attribute, error)


def _imported(where: str, attribute: str, error: type[UserError] = UserError) -> Any:
    try:
        if where.endswith(".py"):
            target: Any = _import_file(Path(where).expanduser())
        else:
            _search(Path.cwd())
            target = importlib.import_module(where)
    except (Exception, SystemExit) as failure:  # a user's module may raise anything while it is imported
        raise error(_import_failure(where, failure)) from failure
    for item in attribute.split("."):
        if not hasattr(target, item):
            raise error(f"{where} has no {attribute!r}{_suggestion(item, target)}")
        target = getattr(target, item)
    return target


def _suggestion(missing: str, target: object) -> str:
    """Words that name a similar name, or the classes and functions that a module of the user's defines."""
    if near := nearest(missing, [name for name in dir(target) if not name.startswith("_")]):
        return f"; did you mean {near}?"
    if not isinstance(target, ModuleType) or not is_of_user(getattr(target, "__file__", None) or "<"):
        return ""
    own = [
        name
        for name, value in vars(target).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == target.__name__
    ]
    more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
    return f"; it defines {', '.join(own[:_SHOWN])}{more}" if own else ""


def import_class(name: str) -> type[Any] | None:
    """The configuration class that an import path names; None if it names something else. Raises `ConfigError` if the
    import fails.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        return None
    try:
        target = _imported(where, attribute) if follows("classes") else import_object(name)
    except UserError as error:
        raise ConfigError([Problem(path="", message=str(error))]) from error
    if isinstance(target, type) and "__attrs_attrs__" not in vars(target) and hasattr(target, "__configuration__"):
        message = f"{target.__qualname__} lacks the decorator @frozen: its own fields would be ignored"
        raise ConfigError([Problem(path="", message=message)])
    return target if isinstance(target, type) and known_class(class_name(target)) is target else None


def _search(*folders: Path) -> None:
    """Find modules in these folders, after all others: nothing there shadows an installed package."""
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(path)
    file = path.resolve()
    name = f"skyrl_user_{file.stem}"  # from the file name, since stored classes refer to it
    if name in sys.modules and sys.modules[name].__file__ != str(file):  # a second file of this name
        from hashlib import sha256

        name = f"{name}_{sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _search(file.parent, Path.cwd())
    _refuse_ambiguous(file)
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
        config_class = known_class(class_name(value)) if isinstance(value, type) and value.__module__ == name else None
        if config_class is not None:
            copyreg.pickle(config_class, _taken_apart)  # another process finds the file, not the module
    return module


def _refuse_ambiguous(file: Path) -> None:
    """Raise `ImportError` if the file imports a module beside it and another of the user's has that name: Python would
    give it that one.
    """
    try:
        nodes = list(ast.walk(parsed_program(file.read_bytes())))
    except SyntaxError:
        return  # which importing it reports
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    for name in dict.fromkeys(alias.partition(".")[0] for alias in names):
        siblings = [path for path in (file.parent / f"{name}.py", file.parent / name / "__init__.py") if path.is_file()]
        other = getattr(sys.modules.get(name), "__file__", None) or getattr(PathFinder.find_spec(name), "origin", None)
        if (
            siblings
            and other
            and is_of_user(other)
            and Path(other).resolve() not in [item.resolve() for item in siblings]
        ):
            raise ImportError(f"{siblings[0]} and {other} are two modules called {name}: rename one of them")


def _import_failure(where: str, failure: BaseException) -> str:
    match failure:
        case FileNotFoundError() if where.endswith(".py") and not Path(where).expanduser().is_file():
            return f"there is no file {where} (relative paths start at the working directory)"
        case ModuleNotFoundError() if location := raised_at(failure):
            folder = Path(where).expanduser().resolve().parent
            beside = f"{folder} or " if where.endswith(".py") and folder != Path.cwd() else ""
            return (
                f"{location.partition(',')[0]} imports the module {failure.name}, which is neither installed nor in "
                f"{beside}the working directory: install it, or put it there"
            )
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
