"""Reading the words of a command line. A value stays text until the type of its field is known.

path=value     set                      ~path           back to the default
path=null      no value                 list+=value     append an item, or several: +=["a", "b"]
list.0=value   an existing item         dict."a.b"=v    a key with a dot in it
table=@file    the table in a file      @file           a whole file, applied at this point in the order
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl.errors import ConfigError, Problem
from skyrl.tree.files import MOST_BYTES
from skyrl.tree.origins import Assignment, Origin, Path, cut_short

_NAME = r'(?:"(?:[^"\\]|\\.)*"|[^."=\s]+)'
_PATH = rf"{_NAME}(?:\.{_NAME})*"


def read_argument(argument: str, number: int) -> Assignment:
    """The assignment in the `number`-th word of a command line, which is not `@file`. Raises `ConfigError`."""
    origin = Origin(kind="argument", where=str(number))
    path = argument.partition("=")[0].strip()
    if len(argument) > MOST_BYTES:
        message = f"this argument has {len(argument)} characters; the limit is {MOST_BYTES}"
        raise ConfigError([Problem(path=cut_short(path), message=message, location=origin.location)])
    if argument.startswith("+"):
        message = "the prefix + is not supported: every field already exists, so leave it out"
        hint = f"write {argument.lstrip('+')}; to add a field, subclass the configuration class"
        raise ConfigError([Problem(path=path, message=message, hint=hint, location=origin.location)])
    if argument.startswith("~"):
        path = argument.removeprefix("~").strip()
        if not re.fullmatch(_PATH, path):
            hint = "~path resets a field to its default and takes no value: ~trainer.epochs"
            raise ConfigError([Problem(path=argument, message=_NO_PATH, hint=hint, location=origin.location)])
        return Assignment(path=split_path(path), value=None, origin=origin, operation="forget")
    if "=" not in argument:
        raise ConfigError([Problem(path=path, message="neither a file nor path=value", location=origin.location)])
    appended = re.fullmatch(rf"\s*(?P<path>{_PATH})\+=(?P<value>.*)", argument, re.DOTALL)
    match = appended or re.fullmatch(rf"\s*(?P<path>{_PATH})\s*=(?P<value>.*)", argument, re.DOTALL)
    if not match:
        raise ConfigError([Problem(path=path or cut_short(argument), message=_NO_PATH, location=origin.location)])
    names = split_path(match["path"].removesuffix("+") if appended else match["path"])
    operation = "append" if appended else "set"
    if not appended:  # what is added contradicts nothing
        origin = Origin(kind="argument", where=str(number), path=names)
    return Assignment(path=names, value=match["value"], origin=origin, is_text=True, operation=operation)  # type: ignore[arg-type]  # a Literal


def read_python(overrides: Mapping[str, Any], where: str = "Python") -> list[Assignment]:
    """Overrides given in Python: dotted paths to values of the field's own type. Raises `ConfigError`."""
    paths = {split_path(path): value for path, value in overrides.items()}
    return [
        Assignment(path=path, value=value, origin=Origin(kind="python", where=where, path=path))
        for path, value in paths.items()
    ]


def split_path(path: str) -> Path:
    """`a.b."c.d"` as `("a", "b", "c.d")`. Raises `ConfigError` for an empty name."""
    if len(path) > MOST_BYTES:
        message = f"this path has {len(path)} characters; the limit is {MOST_BYTES}"
        raise ConfigError([Problem(path=cut_short(path), message=message)])
    if not re.fullmatch(_PATH, path):
        raise ConfigError([Problem(path=path, message=_NO_PATH)])
    names = re.findall(_NAME, path)
    return tuple(re.sub(r"\\(.)", r"\1", name[1:-1]) if name.startswith('"') else name for name in names)


_NO_PATH = "is not a dotted path, such as trainer.policy.model.path"
