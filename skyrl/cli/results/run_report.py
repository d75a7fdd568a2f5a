"""`skyrl report`: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from skyrl.cli.command_line.commands import examples
from skyrl.cli.command_line.extras import require_packages
from skyrl.errors import UserError


@click.command("report", epilog=examples("skyrl report runs/one runs/other --to comparison.html"))
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--to",
    "output",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.",
)
@click.option(
    "--samples", default=60, show_default=True, type=click.IntRange(0, 2000), help="Number of samples per run."
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def report(runs: tuple[Path, ...], output: Path, samples: int, force: bool) -> None:
    """Write curves and samples of RUNS to one HTML file.

    The file has a summary, events, layouts and configurations, too, and needs no network. RUNS are folders of runs,
    finished or not. Several runs are drawn into the same charts, and their configurations are compared.
    """
    require_packages("report", "report", "plotly", "jinja2", "numpy")
    if output.exists() and not force:
        raise UserError(f"{output} already exists: choose another --to, or pass --force")
    from skyrl.storage.atomic import write_file
    from skyrl.tools.plan_picture import pictures_in
    from skyrl.viewer.report import report as html_of

    layouts, gpus = pictures_in(runs)
    html = html_of(runs, samples=samples, layouts=layouts, gpus=gpus)
    try:
        write_file(output, html)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from error
    click.echo(f"{output}: {len(html.encode()) / 1e6:.1f} MB; open it in a browser")
