"""The `skyrl` command: reads arguments, prints results, and turns errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import NoReturn


def start() -> NoReturn:
    """The entry point that is installed as `skyrl`."""
    with lasting_imports():
        from skyrl.cli.main import main

    main()


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Around imports of a command: objects that they make last as long as the process, and are never searched for
    garbage.

    The searches, that at exit included, took a seventh of the time of `skyrl config check` (benchmarks/config.py).
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()
