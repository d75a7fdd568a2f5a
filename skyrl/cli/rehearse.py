"""`skyrl rehearse`: takes the configuration of a large run through every phase on this machine."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skyrl.cli.arguments import ARGUMENTS, split_words

if TYPE_CHECKING:
    from skyrl.tools.rehearsal import Finding


@click.command()
@ARGUMENTS
@click.option(
    "--gpus", type=click.IntRange(min=1), help="Number of GPUs that the run will have; needing more is a failure."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    help="Time limit of each run, in seconds.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Keep the folded run in this folder, which is created if missing."
)
def rehearse(arguments: tuple[str, ...], gpus: int | None, timeout: float, keep: Path | None) -> None:
    """Take the run through every phase on this machine, with its model in miniature, and report the outcome.

    Layout, memory and folders are judged as they are. Then a folded run - one process on a CPU, few prompts, short
    answers - trains, is killed, resumes and is exported. Exit code 1: at least one phase failed.
    """
    from tempfile import TemporaryDirectory

    from skyrl.cli.arguments import compose_rl
    from skyrl.cli.rehearsed_plan import planned_findings
    from skyrl.errors import UserError
    from skyrl.tools.rehearsal import Rehearsal

    run = compose_rl(arguments, "only reinforcement-learning runs can be rehearsed")
    files, words = split_words(arguments)
    with TemporaryDirectory(prefix="skyrl-rehearsal-") as temporary:
        folder = (keep or Path(temporary)).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--keep {folder}: the folder cannot be created: {error.strerror}") from None
        rehearsal = Rehearsal(files=files, words=words, run=run, folder=folder, timeout=timeout)
        failed = 0
        for finding in chain(planned_findings(run, gpus), rehearsal.findings()):
            click.echo(_lines(finding))
            failed += finding.state == "failed"
    if failed:
        click.echo(f"{failed} finding{'s' if failed > 1 else ''} to fix before reserving GPUs", err=True)
        sys.exit(1)


def _lines(finding: Finding) -> str:
    """A finding as a row of the table, with further lines of its text below the first."""
    return f"{finding.phase:<12}{finding.state:<10}" + finding.text.replace("\n", "\n" + " " * 22)
