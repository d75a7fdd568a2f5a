"""Imports whose objects live as long as the process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Context for a command's imports: the objects they create live as long as the process and are excluded from
    garbage collection.

    Collections, including the one at exit, took a seventh of the time of `skyrl config check` (benchmarks/config.py).
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()
