"""`skyrl watch`: shows a run in progress from another terminal."""

from __future__ import annotations

import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import click

from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result


@click.command(cls=FieldsCommand, epilog=examples("skyrl watch runs/mine"))
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--once", is_flag=True, help="Show the current state of the run and exit.")
@json_option
def watch(run: Path, once: bool, as_json: bool) -> None:
    """Show the progress of RUN until it ends.

    RUN is the folder of a run, on this machine or on a shared disk. A terminal shows the same display as `skyrl run`;
    other outputs get one line per step. Ctrl-C stops watching, not the run.
    """
    from skyrl.errors import UserError
    from skyrl.tracking.watching import LivePanel, follow, progress_of, show

    if as_json:
        if not once:
            raise UserError("--json prints the current state of the run: pass --once, too")
        print_result(progress_of(run))
        return
    if once:
        show(run)
        return
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
            for what, command in next_commands(run):
                click.echo(f"  {what:<14} {command}")
