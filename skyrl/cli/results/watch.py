"""`skyrl watch`: shows a run in progress from another terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import click

from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.errors import UserError


@click.command(cls=FieldsCommand, epilog=examples("skyrl watch runs/mine"))
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--once", is_flag=True, help="Show the current state of the run and exit.")
@json_option
def watch(run: Path, once: bool, as_json: bool) -> None:
    """Show the progress of RUN until it ends.

    RUN is the folder of a run or of a training service, on this machine or on a shared disk. A terminal shows the same
    display as `skyrl run`; other outputs get one line per step. Ctrl-C stops watching, not the run.

    Exit code 1: the run failed, or its process is gone.
    """
    from skyrl.tracking.service_status import service_status
    from skyrl.tracking.watching import LivePanel, follow, has_failed, progress_of, show

    if as_json and not once:
        raise UserError("--json prints the current state of the run: pass --once, too")
    status = service_status(run)
    if status is not None:
        _watch_service(run, status, once=once, as_json=as_json)
        return
    if as_json:
        print_result(progress_of(run), ok=not has_failed(run))
        sys.exit(has_failed(run))
    if once:
        show(run)
        sys.exit(has_failed(run))
    from skyrl.runs.summary import next_commands

    ended = threading.Event()
    with suppress(KeyboardInterrupt):
        if sys.stderr.isatty():
            with closing(LivePanel(run, redirect_stdout=False)):
                state = follow(run, lambda line: None, ended)
        else:
            state = follow(run, click.echo, ended)
        click.echo(f"{run}: {state}")
        if state == "finished":
            for purpose, command in next_commands(run):
                click.echo(f"  {purpose:<14} {command}")
        sys.exit(has_failed(run))


def _watch_service(folder: Path, status: Mapping[str, Any], *, once: bool, as_json: bool) -> None:
    """Show what a training service does, again whenever that has changed."""
    from skyrl.tracking.service_status import service_status, status_lines

    if as_json:
        print_result(dict(status))
        return
    previous: list[str] = []
    with suppress(KeyboardInterrupt):
        while True:
            lines = list(status_lines(status))
            if lines != previous:
                click.echo("\n".join(lines))
            if once:
                return
            previous = lines
            time.sleep(1.0)
            status = service_status(folder) or status
