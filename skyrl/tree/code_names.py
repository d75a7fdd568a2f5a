"""Functions, classes and objects given in Python where a configuration has the text of an import path.

A field that names code has the converter `named_code`, which replaces an object by an import path under which
`skyrl.tree.imports` finds it again:

    my_pkg.rewards:exact      the module can be imported
    rewards.py:exact          the module is a file that no import finds, or that a configuration named
    __main__:exact            the object is of the program or notebook that runs: no other process finds it

An object that would not be found again, such as a lambda without a name or a function inside a function, is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from skyrl.tree.types import TypeMismatch, display_value

OF_PROGRAM = "__main__:"
"""Beginning of an import path of the program or notebook that runs."""


def named_code(value: object) -> object:
    """`value`, with every function, class and object in it replaced by its import path. Raises `TypeMismatch`."""
    if isinstance(value, list | tuple):
        return tuple(map(named_code, value))
    is_plain = value is None or isinstance(value, str | bool | int | float | Mapping)
    return value if is_plain else import_path_of(value)


def import_path_of(target: object) -> str:
    """An import path under which the object is found again. Raises `TypeMismatch` if there is none."""
    module = sys.modules.get(getattr(target, "__module__", None) or type(target).__module__)
    modules = [module, sys.modules.get("__main__")]
    for candidate in (item for item in modules if item is not None):
        name = _name_in(candidate, target)
        if name:
            return f"{_module_path(candidate)}:{name}"
    raise TypeMismatch(
        f"{display_value(target)} has no name under which it is found again",
        hint="define it with `def` or `class` outside of any function, or give such an object a name there",
    )


def source_of_program(name: str) -> str | None:
    """Source text of what `__main__:name` names; None if it is not there, or if its source is not known."""
    target: object = sys.modules.get("__main__")
    for part in name.removeprefix(OF_PROGRAM).split("."):
        target = getattr(target, part, None)
    try:
        return inspect.getsource(target if inspect.isroutine(target) or inspect.isclass(target) else type(target))
    except (OSError, TypeError):
        return None


def _name_in(module: ModuleType, target: object) -> str:
    """Name of the object in the module: the one that it was defined under or, for an object that has none, of a
    variable. Empty if it has no name there.
    """
    name = getattr(target, "__qualname__", "")
    inner: object = module
    for part in name.split(".") if name else ():
        inner = getattr(inner, part, None)
    if name and inner is target:
        return str(name)
    return next((key for key, value in vars(module).items() if value is target and not key.startswith("_")), "")


def _module_path(module: ModuleType) -> str:
    """The module as an import path names it: by its file, if importing its name would not find that file."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" or file is None or PathFinder.find_spec(name.partition(".")[0]) is not None:
        return name
    path = Path(file).resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
