"""`skyrl engines`: the engines of a run that is going on, listed, added and drained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from skyrl.runs.engine_changes import Engines


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("action", type=click.Choice(["list", "add", "drain"]), default="list")
@click.argument("numbers", nargs=-1, type=int, metavar="[ENGINE]...")
@click.option("--count", default=1, type=click.IntRange(min=1), help="Number of engines to add or drain.")
def engines(run: Path, action: str, numbers: tuple[int, ...], count: int) -> None:
    """List, add or drain the engines of RUN, the folder of a run that is going on.

    A request is heeded before the next step samples. An added engine gets the next weights and is compared with the
    learner before it serves; a drained one finishes its samples. Without numbers, the last engines are drained.
    """
    from skyrl.errors import UserError
    from skyrl.runs.engine_changes import Engines, ask, unanswered
    from skyrl.runs.run_owner import is_locked

    found = Engines.read(run)
    if action == "list":
        _show(found, unanswered(run))
        return
    if not is_locked(run):
        raise UserError(f"{run} is not going on: its engines are gone")
    if action == "add" and numbers:
        raise UserError("the run numbers the engines that it adds: leave the numbers out, or say how many by --count")
    for number in numbers or [None] * count:
        ask(run, "add" if action == "add" else "drain", number)
    click.echo(f"Asked. The run answers before its next step: skyrl engines {run}")


def _show(found: Engines, waiting: int) -> None:
    """One line for each engine, then the last answers."""
    import time

    click.echo("engine  state                samples  weights")
    for each in found.engines:
        version = "" if each.weight_version is None else str(each.weight_version)
        click.echo(f"{each.number:>6}  {each.state:<19}  {each.samples:>7}  {version:>7}")
    click.echo(f"at least {found.least}, at most {found.most}")
    for answer in found.answers:
        click.echo(f"{time.strftime('%H:%M:%S', time.localtime(answer.moment))}  {answer.asked}: {answer.said}")
    if waiting:
        click.echo(f"{waiting} unanswered: the run looks before its next step samples")
