"""The `skyrl` command: reads arguments, prints results, and turns errors into messages and exit codes."""

from __future__ import annotations

import gc
from typing import NoReturn

from skyrl.cli.command_line.lasting_imports import lasting_imports


def start() -> NoReturn:
    """The entry point that is installed as `skyrl`."""
    with lasting_imports():
        from skyrl.cli.main import main

    try:
        main(is_process=True)
    finally:
        gc.freeze()  # the interpreter would look for garbage among all objects, which takes an eighth of a short run
