"""`skyrl model`: what a model of one's own can do here, and models from files of other programs."""

from __future__ import annotations

from pathlib import Path

import click

from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.extras import require_packages


@click.group(cls=Commands)
def model() -> None:
    """Check a model, or convert one from GGUF."""


@model.command(epilog=examples("skyrl model check Qwen/Qwen2.5-0.5B-Instruct"))
@click.argument("folder")
@click.option(
    "--longest-row", type=click.IntRange(1), help="Tokens of the longest row. Default: all positions of the model."
)
def check(folder: str, longest_row: int | None) -> None:
    """Say how runs compute rows of a model, and what follows.

    FOLDER has a config.json, or is a name on the hub; weights are not read. A small copy of the model with random
    weights is computed in every layout, against each row alone: what differs runs unpacked, or is refused.
    """
    from skyrl.tools.model_check import model_report

    for line in model_report(folder, longest=longest_row):
        click.echo(line)


@model.command("from-gguf", epilog=examples("skyrl model from-gguf smol.gguf model"))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of the stored weights; float32 keeps every value, bfloat16 takes half the space.",
)
def from_gguf(file: Path, folder: Path, dtype: str) -> None:
    """Store the model in FILE as a Hugging Face FOLDER.

    Runs can start from the folder. Quantized weights are dequantized. Architectures are those that transformers reads
    from GGUF.
    """
    require_packages("skyrl model from-gguf", "gguf", "gguf", "torch", "transformers")
    import torch

    from skyrl.models.saving.gguf_file import convert_gguf

    for line in convert_gguf(file, folder, dtype=getattr(torch, dtype)):
        click.echo(line)
    click.echo(f"model in {folder}: set the path of a run's model to it, or try it with skyrl serve {folder}")
