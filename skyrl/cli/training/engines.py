"""`skyrl engines`: lists, adds and drains the engines of a run in progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from attrs import asdict

from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.errors import UserError

if TYPE_CHECKING:
    from skyrl.runs.engine_changes import EngineList


_RUN = click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
_COUNT = click.option("--count", type=click.IntRange(min=1), help="Number of engines [default: 1].")


@click.group(cls=Commands)
def engines() -> None:
    """List, add or drain the engines of a running run.

    The run carries out requests before its next step samples.
    """


@engines.command("list", epilog=examples("skyrl engines list runs/mine"))
@_RUN
@json_option
def list_(run: Path, as_json: bool) -> None:
    """Show the state of each engine, and the latest replies."""
    from skyrl.runs.engine_changes import unanswered
    from skyrl.runs.run_owner import is_locked

    states, waiting, running = _states(run), unanswered(run), is_locked(run)
    if as_json:
        print_result({"running": running, "pending": waiting, **asdict(states)})
        return
    if not running:
        click.echo(f"{run} is not running: its engines are gone. Their last states:")
    click.echo("engine  state                samples  weights")
    for engine in states.engines:
        version = "" if engine.weight_version is None else str(engine.weight_version)
        click.echo(f"{engine.number:>6}  {engine.state:<19}  {engine.samples:>7}  {version:>7}")
    click.echo(f"engines allowed: {states.least} to {states.most}")
    for answer in states.answers:
        click.echo(f"{time.strftime('%H:%M:%S', time.localtime(answer.moment))}  {answer.asked}: {answer.said}")
    if waiting:
        click.echo(f"requests pending: {waiting}; the run replies before its next step samples")


@engines.command(epilog=examples("skyrl engines add runs/mine --count 2"))
@_RUN
@_COUNT
def add(run: Path, count: int | None) -> None:
    """Add engines on free GPUs of the cluster.

    They receive the next weights, and are compared with the learner before they serve.
    """
    _request(run, "add", [None] * (count or 1))


@engines.command(epilog=examples("skyrl engines drain runs/mine 0"))
@_RUN
@click.argument("numbers", nargs=-1, type=int, metavar="[ENGINE]...")
@_COUNT
def drain(run: Path, numbers: tuple[int, ...], count: int | None) -> None:
    """Take engines out of service once their samples are done.

    Without numbers, the last engines are drained.
    """
    if count is not None and numbers:
        raise UserError("--count works only without engine numbers")
    _request(run, "drain", numbers or [None] * (count or 1))


def _states(run: Path) -> EngineList:
    """The engines of a run. Raises `UserError` if it has none."""
    from skyrl.runs.engine_changes import EngineList
    from skyrl.runs.stored_runs import refuse_supervised

    refuse_supervised(run, "it has no engines")
    return EngineList.read(run)


def _request(run: Path, action: Literal["add", "drain"], numbers: Sequence[int | None]) -> None:
    """Ask a running run for an action on each engine. Raises `UserError` if the run has ended."""
    from skyrl.runs.engine_changes import ask
    from skyrl.runs.run_owner import is_locked

    _states(run)
    if not is_locked(run):
        raise UserError(f"{run} is not running: it has no engines to change")
    for number in numbers:
        ask(run, action, number)
    click.echo(f"Requested. The run replies before its next step: skyrl engines list {run}")
