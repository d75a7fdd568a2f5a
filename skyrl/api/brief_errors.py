"""Errors of the public functions, without the frames inside the library.

A message of `skyrl.errors` is complete: it says what is wrong, where, and what to do. A notebook would print the code
of every frame between the caller and the place that raised it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from skyrl.errors import SkyRLError, Stopped

P = ParamSpec("P")
R = TypeVar("R")


def brief_errors(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose errors raised on purpose begin at its caller. Any other exception keeps its traceback."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (SkyRLError, Stopped) as error:
            raise error.with_traceback(None) from None

    return call
