"""`skyrl model`: what a model of one's own can do here."""

from __future__ import annotations

import click

from skyrl.cli.command_line.commands import Commands


@click.group(cls=Commands)
def model() -> None:
    """Check a model before a run."""


@model.command()
@click.argument("folder")
@click.option(
    "--longest-row", type=click.IntRange(1), help="Tokens of the longest row. Default: all positions of the model."
)
def check(folder: str, longest_row: int | None) -> None:
    """Say how a run computes the rows of a model, and which settings follow.

    FOLDER has a config.json, or is a name on the hub; weights are not read. A small copy of the model with random
    weights is computed in every layout, against each row alone: what differs runs unpacked, or is refused.
    """
    from skyrl.tools.model_check import model_report

    for line in model_report(folder, longest=longest_row):
        click.echo(line)
