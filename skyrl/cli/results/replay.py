"""`skyrl replay` and `skyrl bisect`: whether a step reproduces its record, and where two runs diverge."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import asdict

from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.processes.torch_environment import set_torch_environment

if TYPE_CHECKING:
    from skyrl.tools.comparing import Difference

_RUN = click.Path(exists=True, file_okay=False, path_type=Path)


def _steps(context: click.Context, parameter: click.Parameter, value: str) -> range:
    """Parse a step or a range of steps: `7` or `3-7`."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise click.BadParameter(f"{value!r} is not a step: write 7 or 3-7; steps start at 1")
    return range(first, last + 1)


@click.command(epilog=examples("skyrl replay runs/mine --step 3-7"))
@click.argument("run", type=_RUN)
@click.option(
    "--step", "steps", callback=_steps, required=True, metavar="STEP", help="A step, or a range of steps: 3-7."
)
@click.option("--checkpoints", type=_RUN, help="Folder of the run's checkpoints [default: where the run wrote them].")
@click.option("--trust", is_flag=True, help="Run the code that the stored run names.")
def replay(run: Path, steps: range, checkpoints: Path | None, trust: bool) -> None:
    """Compute recorded steps of RUN again, and compare every bit.

    They start from the checkpoint before them.
    RUN is the folder of a run with trainer.recording = jsonl or jsonl.gz. The exit code is 1 if something differs.
    """
    set_torch_environment()
    from skyrl.tools.replay import Replay

    replayer = Replay(run, checkpoints=checkpoints, import_stored=trust)
    start = replayer.start_for(steps.start)
    click.echo(f"from {f'the checkpoint of step {start}' if start else 'the model that the run started from'}")
    for other in replayer.other_versions():
        click.echo(f"differs from the recording, which may change the last bits: {other}")
    for replayed in replayer.run(steps):
        step, differences = replayed.computed.step, replayed.differences
        if differences:
            click.echo(f"step {step} differs, first in {_spelled(differences, 'recorded', 'now')}")
            raise click.exceptions.Exit(1)
        updates, weights = replayed.computed.updates, replayed.computed.weights
        norms = ", ".join(f"{update.learner} {update.metrics['grad_norm']:.9g}" for update in updates)
        learnt = f"losses; gradient norm {norms}" if updates else "skipped again, no updates"
        click.echo(
            f"step {step} is bit-equal: {', '.join(replayed.computed.tensors)}; {learnt}; "
            f"{sum(map(len, weights.values()))} weights"
        )


@click.command(cls=FieldsCommand, epilog=examples("skyrl bisect runs/one runs/other"))
@click.argument("run_a", type=_RUN)
@click.argument("run_b", type=_RUN)
@json_option
def bisect(run_a: Path, run_b: Path, as_json: bool) -> None:
    """Find the first step at which two runs diverge.

    In it, the first token, tensor or key is named.
    RUN_A and RUN_B are folders of runs with recordings; without recordings their metrics are compared. The exit code is
    1 if they diverge.
    """
    from skyrl.tools.comparing import bisect as part

    parting = part(run_a, run_b)
    if as_json:
        print_result(asdict(parting), ok=not parting.differences)
        raise click.exceptions.Exit(1 if parting.differences else 0)
    for path, (one, other) in parting.configuration.items():
        click.echo(f"configuration: {path} = {json.dumps(one)} in A, {json.dumps(other)} in B")
    for path, (one, other) in parting.code.items():
        click.echo(f"code: {path} is {one or 'absent'} in A, {other or 'absent'} in B")
    kind = "recordings" if parting.recorded else "metrics (one of the runs has no recording)"
    if parting.differences:
        equal = [step for step in parting.compared if step != parting.compared[-1]]
        click.echo(f"{kind} are equal in {_count(equal)}")
        click.echo(f"step {parting.compared[-1]} diverges, first in {_spelled(parting.differences, 'in A', 'in B')}")
        raise click.exceptions.Exit(1)
    click.echo(f"{kind} are equal in {_count(parting.compared)}")
    if parting.only_in_one:
        click.echo(f"only one of the runs has {_count(parting.only_in_one)}")


def _spelled(differences: Sequence[Difference], one: str, other: str) -> str:
    first, *rest = differences
    lines = [f"{first.quantity}:", f"  {first.where}: {first.one} {one}, {first.other} {other}"]
    if rest:
        lines.append(f"  then in: {', '.join(dict.fromkeys(difference.quantity for difference in rest))}")
    return "\n".join(lines)


def _count(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
