"""`skyrl data`: a run's data as the model receives it, before training: what it holds, and files to train on."""

from __future__ import annotations

from pathlib import Path

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, TRUST, compose_arguments
from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import json_option, print_either


@click.group(cls=Commands)
def data() -> None:
    """Inspect, show, make or split the data of a run.

    Rows are read as the run reads them: with its columns, its chat template and its longest length.
    """


@data.command(epilog=examples("skyrl data inspect run.toml"))
@ARGUMENTS
@TRUST
@json_option
def inspect(arguments: tuple[str, ...], as_json: bool) -> None:
    """Report what the sources of a run hold.

    For each source: columns, lengths in tokens after the chat template, which rows are left out and why, and which
    occur twice; then the validation rows that are also trained on. Exits with 2 if the run would refuse a source.
    """
    run = compose_arguments(arguments).config
    from attrs import asdict

    from skyrl.tools.data_report import data_report, text_of

    report = data_report(run)
    usable = not any(source.refused for source in report.sources)
    print_either(asdict(report), text_of(report), as_json=as_json, ok=usable)


@data.command(
    epilog=examples(
        "skyrl data make gsm8k --out runs/gsm8k", "skyrl data make gsm8k --out mine --source train=questions.jsonl"
    )
)
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the files.")
@click.option(
    "--source",
    "sources",
    metavar="PART=SOURCE",
    multiple=True,
    help="Rows of the same columns in place of those on the hub; may be repeated.",
)
@json_option
def make(name: str, out: Path, sources: tuple[str, ...], as_json: bool) -> None:
    """Write a public data set as files of prompts: gsm8k.

    Its rows come from Hugging Face's hub, and are written in the form that its environment reads.
    """
    from skyrl.data.makers import make_files

    sizes = make_files(name, out, sources)
    text = "\n".join(f"{file}: {count} prompts" for file, count in sizes.items())
    print_either({"files": sizes}, text, as_json=as_json)


@data.command(epilog=examples("skyrl data split run.toml --out data --share 0.1"))
@ARGUMENTS
@TRUST
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the two files.")
@click.option(
    "--share",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of the prompts that validation gets.",
)
@click.option("--seed", default=0, show_default=True, help="Which prompts these are.")
@json_option
def split(arguments: tuple[str, ...], out: Path, share: float, seed: int, as_json: bool) -> None:
    """Divide training rows into two files, one for validation.

    Reads all training sources of the run, and writes train.jsonl and validation.jsonl. Rows with the same prompt stay
    on one side.
    """
    run = compose_arguments(arguments).config
    from attrs import asdict

    from skyrl.tools.data_report import split_data

    halves = split_data(run, out, share, seed)
    text = f"{halves.train}: {halves.rows[0]} rows\n{halves.validation}: {halves.rows[1]} rows"
    print_either(asdict(halves), text, as_json=as_json)


@data.command(epilog=examples("skyrl data show run.toml --row 3"))
@ARGUMENTS
@TRUST
@click.option(
    "--row", "index", default=0, show_default=True, type=click.IntRange(0), help="Number of the row, counted from 0."
)
@click.option(
    "--source",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Number of the training source, counted from 0.",
)
@json_option
def show(arguments: tuple[str, ...], index: int, source: int, as_json: bool) -> None:
    """Print a row as the model gets it, with special tokens.

    A prompt is shown as its row has it: tools and messages that the environment adds when it starts are not in it.
    The learned tokens are between ⟦ and ⟧. A weight in the loss other than 1 follows the bracket: ⟦Four.⟧*0.5.
    """
    run = compose_arguments(arguments).config
    from skyrl.tools.data_report import row_page

    page = row_page(run, source, index)
    print_either({"source": source, "row": index, "text": page}, page, as_json=as_json)
