"""`skyrl data`: shows a run's data as the model receives it, before training."""

from __future__ import annotations

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, TRUST, compose_arguments
from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import json_option, print_result


@click.group(cls=Commands)
def data() -> None:
    """Show rows of the data as the model gets them."""


@data.command(epilog=examples("skyrl data show run.toml --row 3"))
@ARGUMENTS
@TRUST
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
@json_option
def show(arguments: tuple[str, ...], place: int, source: int, as_json: bool) -> None:
    """Print a row as the model gets it, with special tokens.

    The learned tokens are between ⟦ and ⟧. A weight in the loss other than 1 follows the bracket: ⟦Four.⟧*0.5.
    """
    run = compose_arguments(arguments).config
    from skyrl.tools.row_view import row_page

    page = row_page(run, source, place)
    if as_json:
        print_result({"source": source, "row": place, "text": page})
    else:
        click.echo(page)
