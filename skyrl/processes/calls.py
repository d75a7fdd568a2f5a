"""Calls of methods in other processes: a method is sent by its import name, and its outcome comes back as a value."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl.errors import SkyRLError
from skyrl.processes.redaction import redacted
from skyrl.tree.frames import raised_at

Name = tuple[str, str]
"""Module and qualified name, such as `("skyrl.inference.engine", "InferenceEngine.pause")`."""


@frozen
class CallResult:
    """The return value of a call."""

    value: Any


@frozen
class CallFailure:
    """The exception of a call, without its traceback, which the log of the process has."""

    ours: SkyRLError | None
    """The exception itself if it is a `SkyRLError`, whose message is complete; otherwise None."""

    summary: str
    """Type and message, on one line."""


def name_of(method: Callable[..., object]) -> Name:
    """The name by which another process can import the method. Raises TypeError if there is none."""
    name = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    match name:
        case (str(module), str(qualname)) if "<" not in qualname and resolve_name((module, qualname)) is method:
            return module, qualname
    raise TypeError(
        f"{method!r} cannot be called in another process: methods are sent by name, so pass a function or a method "
        "of a class that is defined at the top level of an importable module (no lambda, partial or bound method)"
    )


def resolve_name(name: Name) -> Any:
    """The object of this name; None if its module has no such object. Raises ImportError."""
    module, qualname = name
    try:
        return operator.attrgetter(qualname)(importlib.import_module(module))
    except AttributeError:
        return None


def apply(
    target: object, method: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """`method(target, *args, **kwargs)`; a method of a class or Protocol means the target's own version of it."""
    owner, _, attribute = method.__qualname__.rpartition(".")
    if owner:
        return getattr(target, attribute)(*args, **kwargs)
    return method(target, *args, **kwargs)


def summary(error: BaseException) -> str:
    """Type and message of an exception, on one line of at most 500 characters, and the user's line that raised it."""
    text = redacted(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"))
    location = raised_at(error)
    return (text if len(text) <= 500 else text[:497] + "...") + (f" ({location})" if location else "")
