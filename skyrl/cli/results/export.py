"""`skyrl export`: writes the model of a checkpoint in a format that other programs load."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from skyrl.cli.command_line.commands import examples

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(epilog=examples("skyrl export runs/mine --to model"))
@click.argument("run", type=_FOLDER)
@click.option("--step", type=click.IntRange(min=1), help="Step of the checkpoint to export [default: the newest].")
@click.option(
    "--to", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to [default: below export_path]."
)
@click.option(
    "--adapter", is_flag=True, help="Export only the LoRA adapter, in PEFT's format, not merged into the model."
)
@click.option(
    "--checkpoints", type=_FOLDER, help="Folder of the run's checkpoints [default: where the run wrote them]."
)
def export(run: Path, step: int | None, to: Path | None, adapter: bool, checkpoints: Path | None) -> None:
    """Store the model of a checkpoint of RUN as a Hugging Face folder.

    The folder has weights, configuration and tokenizer. RUN is the folder of a run, which may still be in progress. An
    existing export is replaced once the new one is complete.
    """
    from skyrl.storage.atomic import refuse_other_files
    from skyrl.tools.exporting import MODEL_FILES
    from skyrl.tools.exporting import export as export_checkpoint

    if to is not None:
        refuse_other_files(to, MODEL_FILES)
    saved, folder = export_checkpoint(run, step=step, to=to, adapter=adapter, checkpoints=checkpoints)
    click.echo(f"step {saved}: {'adapter' if adapter else 'model'} in {folder}")
    if not adapter:
        click.echo(f"Next: skyrl serve {shlex.quote(str(folder))}")
