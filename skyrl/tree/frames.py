"""Where a user's own code raised an exception, for the message about it."""

from __future__ import annotations

import os
from functools import cache
from types import CodeType
from typing import Literal

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def raised_at(error: BaseException) -> str:
    """`reward.py:12, in scored`: the innermost frame of user code in the traceback; empty if there is none.

    User code is everything outside this package, the standard library and installed packages. If there is none, the
    innermost frame of an installed package is used. For a syntax error it is the location in the source.
    """
    from traceback import walk_tb

    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = {_owner(frame.f_code.co_filename): (frame.f_code, line) for frame, line in walk_tb(error.__traceback__)}
    code, line = frames.get("user") or frames.get("installed") or (None, 0)
    return f"{_short(code.co_filename)}:{line}, in {code.co_name}" if code else ""


def described(error: BaseException) -> str:
    """Type, message and place of an exception: `KeyError: 'answer' (reward.py:12, in scored)`."""
    text, location = str(error), raised_at(error)
    return type(error).__name__ + (f": {text}" if text else "") + (f" ({location})" if location else "")


def defined_at(function: object) -> str:
    """`reward.py:3`: where a function is defined; empty for one that is not written in Python."""
    code = getattr(function, "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


def is_of_user(file: str) -> bool:
    """Whether a source file belongs neither to this package, nor to Python, nor to an installed package."""
    return _owner(file) == "user"


def _owner(file: str) -> Literal["user", "installed", "standard", "ours"]:
    path = os.path.abspath(file)
    if path.startswith(_OURS):
        return "ours"
    if any(part in path for part in _INSTALLED):
        return "installed"
    return "standard" if file.startswith("<") or path.startswith(_standard()) else "user"


@cache
def _standard() -> tuple[str, ...]:
    """The folders of the standard library, looked up on first use: `sysconfig` is slow to import."""
    import sysconfig

    return tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


def _short(file: str) -> str:
    """The path relative to the working directory if the file is below it, else the path as given."""
    return os.path.abspath(file).removeprefix(os.getcwd() + os.sep)
