"""`skyrl timeline`: writes what every process did in a step as a trace to view in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import click

from skyrl.cli.command_line.commands import examples
from skyrl.errors import UserError


@click.command(epilog=examples("skyrl timeline runs/mine --step 3"))
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--step", "steps", multiple=True, type=click.IntRange(min=1), help="Only this step; may be repeated.")
@click.option(
    "--to", type=click.Path(dir_okay=False, path_type=Path), help="File to write [default: RUN/timeline.json]."
)
def timeline(run: Path, steps: tuple[int, ...], to: Path | None) -> None:
    """Write the timeline of RUN's profiled steps as a Chrome trace.

    The steps are those in trainer.profile_steps. Open the file in https://ui.perfetto.dev or chrome://tracing. The
    phases of the step are one track, and each process is another; all times are on the clock of `skyrl run`.
    """
    from skyrl.runs.run_folder import RunFolder
    from skyrl.storage.atomic import write_file
    from skyrl.tracking.timeline import chrome_trace

    records = [record for record in RunFolder(run).timeline.read() if not steps or record["step"] in steps]
    if not records:
        which = f" of step {', '.join(map(str, steps))}" if steps else ""
        raise UserError(
            f"{run} has no timeline{which}: a run records timelines only of the steps in trainer.profile_steps"
        )
    file = to or run / "timeline.json"
    try:
        write_file(file, json.dumps(chrome_trace(records)))
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error
    click.echo(f"{len(records)} step{'s' if len(records) > 1 else ''} in {file}: open it in https://ui.perfetto.dev")
