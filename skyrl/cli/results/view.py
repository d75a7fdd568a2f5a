"""`skyrl view`: shows the samples of a run in a browser."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from skyrl.cli.command_line.commands import examples
from skyrl.cli.command_line.extras import require_packages
from skyrl.cli.command_line.service_options import port_option
from skyrl.errors import UserError

_HOST = "127.0.0.1"


@click.command(epilog=examples("skyrl view runs/mine"))
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@port_option(8008)
@click.option("--index", type=click.Path(dir_okay=False, path_type=Path), help="Index file [default: in RUN].")
def view(run: Path, port: int, index: Path | None) -> None:
    """Browse the samples of RUN in a browser.

    RUN is the folder of a run, which may still be in progress, or of a training service, whose models and clients are
    shown, too. The page is read-only and is served only to this
    machine, to users with the key in the printed address. An index of the samples is kept in RUN/trajectories.index,
    and may be deleted.
    """
    require_packages("view", "view", "starlette", "uvicorn", "jinja2", "pyarrow")
    from skyrl.tracking.service_status import SERVICE_STATUS

    samples = run / "trajectories.jsonl"
    is_service = (run / SERVICE_STATUS).is_file()
    if not is_service and not samples.is_file():
        from skyrl.runs.stored_runs import refuse_supervised, runs_below

        refuse_supervised(run, f"skyrl report {run} shows its curves")
        hint = runs_below(run, "skyrl view") or ": runs that sample write it in their first step"
        raise UserError(f"{run} has no trajectories.jsonl{hint}")
    from skyrl.processes.service import listen, serve
    from skyrl.tracking.token_file import FOLDER, TokenFiles
    from skyrl.viewer.pages import Pages
    from skyrl.viewer.sample_index import SampleIndex
    from skyrl.viewer.server import RunFollower, view_app
    from skyrl.viewer.service_pages import ServiceFollower, ServicePages

    with ExitStack() as stack:
        bound = stack.enter_context(listen(_HOST, port, None, ""))
        if index is None:  # in a temporary folder if that of the run is not writable
            folder = run if os.access(run, os.W_OK) else Path(stack.enter_context(tempfile.TemporaryDirectory()))
            index = folder / "trajectories.index"
        samples_index = SampleIndex(samples, index)
        if is_service:
            pages: Pages = ServicePages(run.absolute(), samples_index)
            follower: RunFollower = ServiceFollower(samples_index, pages.metrics, run)
        else:
            pages = Pages(run.absolute(), samples_index, TokenFiles(run / FOLDER))
            follower = RunFollower(samples_index, pages.metrics, run)
        follower.look()  # so that the first page has something to show
        follower.start()
        stack.callback(follower.close)
        key = secrets.token_urlsafe(16)
        click.echo(f"{run} at http://{_HOST}:{bound.getsockname()[1]}/?key={key} (Ctrl-C to stop)")
        serve(view_app(pages, follower, key), bound)
    click.echo("The viewer has stopped.")
