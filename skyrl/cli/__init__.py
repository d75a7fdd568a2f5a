"""The `skyrl` command: reads arguments, prints results, and turns errors into messages and exit codes."""

from __future__ import annotations

from typing import NoReturn

from skyrl.cli.command_line.lasting_imports import lasting_imports


def start() -> NoReturn:
    """The entry point that is installed as `skyrl`."""
    with lasting_imports():
        from skyrl.cli.main import main

    main(is_process=True)
