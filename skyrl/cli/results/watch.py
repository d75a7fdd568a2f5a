"""`skyrl watch`: shows a run in progress from another terminal."""

from __future__ import annotations

import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--once", is_flag=True, help="Show the current state of the run and exit.")
def watch(run: Path, once: bool) -> None:
    """Watch RUN, the folder of a run on this machine or on a shared disk, until it ends.

    A terminal shows the same display as `skyrl run`; other outputs get one line per step. Ctrl-C stops watching, not
    the run.
    """
    from skyrl.tracking.watching import LivePanel, follow, show

    if once:
        show(run)
        return
    ended = threading.Event()
    with suppress(KeyboardInterrupt):
        if sys.stderr.isatty():
            with closing(LivePanel(run, redirect_stdout=False)):
                state = follow(run, lambda line: None, ended)
        else:
            state = follow(run, click.echo, ended)
        click.echo(f"{run}: {state}")
