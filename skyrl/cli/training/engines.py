"""`skyrl engines`: lists, adds and drains the engines of a run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from skyrl.runs.engine_changes import EngineList


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("action", type=click.Choice(["list", "add", "drain"]), default="list")
@click.argument("numbers", nargs=-1, type=int, metavar="[ENGINE]...")
@click.option("--count", type=click.IntRange(min=1), help="Number of engines to add or drain [default: 1].")
def engines(run: Path, action: str, numbers: tuple[int, ...], count: int | None) -> None:
    """List, add or drain the engines of RUN, the folder of a running run.

    The run carries out requests before its next step samples. An added engine receives the next weights and is compared
    with the learner before it serves. A drained engine finishes its samples first; without numbers, the last engines
    are drained.
    """
    from skyrl.errors import UserError
    from skyrl.runs.engine_changes import EngineList, ask, unanswered
    from skyrl.runs.run_owner import is_locked
    from skyrl.runs.stored_runs import refuse_supervised

    refuse_supervised(run, "it has no engines")
    states = EngineList.read(run)
    if action != "drain" and numbers:
        raise UserError(
            f"{action} takes no engine numbers" + ("; use --count to set how many to add" * (action == "add"))
        )
    if count is not None and (numbers or action == "list"):
        raise UserError("--count works only with add, or with drain without engine numbers")
    if action == "list":
        if not is_locked(run):
            click.echo(f"{run} is not running: its engines are gone. Their last states:")
        _show(states, unanswered(run))
        return
    if not is_locked(run):
        raise UserError(f"{run} is not running: it has no engines to change")
    for number in numbers or [None] * (count or 1):
        ask(run, "add" if action == "add" else "drain", number)
    click.echo(f"Requested. The run replies before its next step: skyrl engines {run}")


def _show(states: EngineList, waiting: int) -> None:
    """Print one line for each engine, then the latest replies."""
    import time

    click.echo("engine  state                samples  weights")
    for engine in states.engines:
        version = "" if engine.weight_version is None else str(engine.weight_version)
        click.echo(f"{engine.number:>6}  {engine.state:<19}  {engine.samples:>7}  {version:>7}")
    click.echo(f"engines allowed: {states.least} to {states.most}")
    for answer in states.answers:
        click.echo(f"{time.strftime('%H:%M:%S', time.localtime(answer.moment))}  {answer.asked}: {answer.said}")
    if waiting:
        click.echo(f"requests pending: {waiting}; the run replies before its next step samples")
