"""`skyrl data`: shows a run's data as the model receives it, before training."""

from __future__ import annotations

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, compose_arguments
from skyrl.cli.command_line.commands import Commands


@click.group(cls=Commands)
def data() -> None:
    """Inspect the data of a run."""


@data.command()
@ARGUMENTS
@click.option(
    "--row", "place", default=0, show_default=True, type=click.IntRange(0), help="Number of the row, counted from 0."
)
@click.option(
    "--source",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Number of the training source, counted from 0.",
)
def show(arguments: tuple[str, ...], place: int, source: int) -> None:
    """Print a row as the model gets it, special tokens included, with the learned tokens between ⟦ and ⟧.

    A weight in the loss other than 1 follows the bracket: ⟦Four.⟧*0.5.
    """
    run = compose_arguments(arguments).config
    from skyrl.tools.row_view import row_page

    click.echo(row_page(run, source, place))
