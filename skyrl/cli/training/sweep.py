"""`skyrl sweep`: trains one run repeatedly with different values, on any launcher."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import TYPE_CHECKING, Any

import click

from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.cli.training.launch import cluster_options, launcher_of, read_cluster, shortest_path
from skyrl.errors import SkyRLError, UserError
from skyrl.installation import install_command

if TYPE_CHECKING:
    from skyrl.sweeps.sweep_file import SweepConfig
    from skyrl.sweeps.trials import Trials


@click.command(
    cls=FieldsCommand, epilog=examples("skyrl sweep sweep.toml --at-once 2", "skyrl sweep sweep.toml --report")
)
@click.argument("file", metavar="SWEEP", type=click.Path(dir_okay=False))
@click.option(
    "--on", "target", type=click.Choice(["local", "ray", "slurm"]), default="local", show_default=True, help="Launcher."
)
@click.option("--at-once", type=click.IntRange(min=1), help="Number of runs at once [default: the number in the file].")
@click.option("--dry-run", is_flag=True, help="Print the runs without starting any.")
@click.option("--report", "only_report", is_flag=True, help="Compare the existing runs without starting any.")
@click.option("--retry", is_flag=True, help="Also train failed runs again.")
@cluster_options
@json_option
def sweep(
    file: str,
    target: str,
    at_once: int | None,
    dry_run: bool,
    only_report: bool,
    retry: bool,
    cluster_file: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train every combination of values in SWEEP, and compare the runs.

    The same command resumes a sweep: finished runs are not trained again, and new values add runs.
    """
    from skyrl.launchers.job import RECORD, absent, withdraw
    from skyrl.sweeps.results import unmeasured
    from skyrl.sweeps.sweep_file import load_sweep
    from skyrl.sweeps.trials import spelled, trials_of, waiting

    if as_json and not only_report:
        raise UserError("--json prints the comparison of existing runs: pass --report, too")
    plan = load_sweep(file)
    trials = trials_of(plan, os.environ, device=None if target == "local" else "cuda")
    for sentence in (*unmeasured(plan.metric), *trials.twice):
        click.echo(sentence, err=True)
    if dry_run:
        for trial in trials.trials:
            click.echo(f"{trial.number}  {trial.state:<8}  {spelled(trial.point)}")
        return
    chosen = list(waiting(trials, retry=retry))
    if not only_report and chosen:
        new_folders = absent(trials.folder)
        trials.write()
        try:
            if not _train(target, plan, trials, chosen, at_once or plan.at_once, read_cluster(cluster_file, settings)):
                return
        except SkyRLError:
            if new_folders and not any(trials.folder.rglob(RECORD)):
                withdraw(trials.folder, new_folders[1:])
            raise
    _compare(plan, trials, as_json=as_json)


def _train(target: str, plan: SweepConfig, trials: Trials, chosen: list[Any], at_once: int, cluster: Any) -> bool:
    """Train the chosen trials. Returns whether they have ended."""
    from skyrl.sweeps.running import (
        one_at_a_time,
        refuse_other_targets,
        refuse_while_it_runs,
        run_here,
        submit_array,
    )

    launcher = launcher_of(target, cluster)
    refuse_other_targets(trials.folder, target)
    if target == "slurm":
        refuse_while_it_runs(trials.folder, launcher)
        started = submit_array(launcher, trials, chosen, at_once, plan.name)
        click.echo(f"{len(chosen)} runs were submitted as job {started.id}, {at_once} at a time.")
        click.echo(f"  skyrl launch status {started.folder}\n  skyrl launch stop {started.folder}")
        return False
    with one_at_a_time(trials.folder):
        run_here(launcher, chosen, at_once, click.echo)
    return True


def _compare(plan: SweepConfig, trials: Trials, *, as_json: bool) -> None:
    """Print the comparison, and write it with the curves of all runs to the sweep's folder."""
    from skyrl.storage.atomic import write_files
    from skyrl.sweeps.results import as_data, results, table

    compared = results(trials.trials, plan.metric, plan.goal)
    if as_json:
        print_result({"metric": plan.metric, "goal": plan.goal, "points": as_data(compared)})
    else:
        click.echo(table(compared, plan.metric))
    runs = [trial.run_folder for trial in trials.trials if (trial.run_folder / "metrics.jsonl").exists()]
    if not runs:
        return
    written = {trials.folder / "results.json": json.dumps(as_data(compared), indent=2) + "\n"}
    if any(importlib.util.find_spec(name) is None for name in ("plotly", "jinja2", "numpy")):
        click.echo(f"no curves were drawn; to draw them: {install_command('report')}", err=True)
    else:
        from skyrl.viewer.report import report

        written[trials.folder / "report.html"] = report(runs, samples=max(1, 60 // len(runs)))
    write_files(written)
    if not as_json:
        click.echo("\nThe comparison is in:\n" + "\n".join(f"  {shortest_path(file)}" for file in written))
