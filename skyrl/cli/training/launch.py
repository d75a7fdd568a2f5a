"""`skyrl launch`: starts runs that outlive the terminal: on this machine, on a Ray cluster or as Slurm jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, STRICT, TRUST, refuse_nothing, split_words
from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.errors import SkyRLError

if TYPE_CHECKING:
    from skyrl.config.cluster import ClusterConfig
    from skyrl.launchers.job import Launch, Launcher

_FILE = "cluster.toml"


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator with the options of every command that starts runs elsewhere."""
    settings = click.option(
        "--set", "settings", multiple=True, metavar="PATH=VALUE", help="Override a value of the cluster's description."
    )
    file = click.option(
        "--cluster",
        "cluster_file",
        envvar="SKYRL_CLUSTER",
        metavar="FILE",
        help=f"File that describes the cluster (docs/launching.md) [default: {_FILE} in this folder, if any].",
    )
    return file(settings(function))


@click.group(cls=Commands)
def launch() -> None:
    """Train in the background here, on a Ray cluster, or as jobs of Slurm."""


def _target(name: Literal["local", "ray", "slurm"], about: str) -> None:
    @launch.command(
        name,
        help=f"{about}\n\nThe arguments are those of skyrl run.",
        epilog=examples(f"skyrl launch {name} run.toml --name long"),
    )
    @ARGUMENTS
    @STRICT
    @TRUST
    @cluster_options
    @click.option("--name", "launch_name", help="Name of the launch [default: the run's name].")
    @click.option("--after", multiple=True, metavar="LAUNCH", help="Start after this launch or Slurm job succeeds.")
    @click.option("--dry-run", is_flag=True, help="Print what would be started, without starting it.")
    def start(arguments: tuple[str, ...], strict: bool, **options: Any) -> None:
        _start(name, arguments, strict, **options)


_target("local", "Start a run in the background on this machine.")
_target("ray", "Submit a run to a Ray cluster.\n\nIt is at `ray.address` of the cluster's description.")
_target("slurm", "Submit a run as a Slurm job.\n\nIt saves a checkpoint before its time limit, and requeues itself.")


def _start(
    target: Literal["local", "ray", "slurm"],
    arguments: Sequence[str],
    strict: bool,
    cluster_file: str | None,
    settings: tuple[str, ...],
    launch_name: str | None,
    after: tuple[str, ...],
    dry_run: bool,
) -> None:
    refuse_nothing(arguments, "launch")
    from skyrl.experiments.folder_checks import folders_belong_to_run
    from skyrl.launchers.job import absent, new_folder, withdraw
    from skyrl.launchers.prepared import Prepared

    files, overrides = split_words(arguments)
    cluster = read_cluster(cluster_file, settings)
    checks = (folders_belong_to_run,)
    prepared = Prepared(target, files, overrides, cluster, environ=os.environ, strict=strict, also=checks)
    for line in prepared.remarks:
        click.echo(line, err=True)
    name = launch_name or prepared.name
    if dry_run:
        click.echo(prepared.shown(name, after, cluster.python or sys.executable), nl=False)
        return
    parent = Path(cluster.folder).absolute()
    new_folders = absent(parent)
    folder = new_folder(parent, name)
    try:
        started = launcher_of(target, prepared.cluster).start(prepared.job(name, folder, after))
    except SkyRLError:  # nothing was submitted, or no reply came: such a job ends because its folder is missing
        withdraw(folder, new_folders)
        raise
    path = shortest_path(started.folder)
    click.echo(f"{started.name} was started: {target} {started.id}, in {path}")
    click.echo(f"  skyrl launch status {path}\n  skyrl launch logs -f {path}\n  skyrl launch stop {path}")


@launch.command(epilog=examples("skyrl launch status", "skyrl launch status launches/mine"))
@click.argument("folders", nargs=-1, metavar="[LAUNCH]...")
@cluster_options
@json_option
def status(folders: tuple[str, ...], cluster_file: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Show the state of launches: the named ones, or all."""
    from skyrl.launchers.job import launches

    cluster = read_cluster(cluster_file, settings)
    chosen = [_find_launch(entry, cluster) for entry in folders] or list(launches(Path(cluster.folder)))
    if not (chosen or as_json):
        click.echo(f"no launches in {cluster.folder}")
    width = max((len(shortest_path(entry.folder)) for entry in chosen), default=0)
    rows = []
    for entry in chosen:
        try:
            state = launcher_of(entry.target, cluster).state(entry)
        except SkyRLError as error:
            state = f"unknown: {error}"
        if as_json:
            rows.append({"folder": str(entry.folder), "target": entry.target, "id": entry.id, "state": state})
        else:
            click.echo(f"{shortest_path(entry.folder):<{width}}  {entry.target:<5}  {entry.id:<10}  {state}")
    if as_json:
        print_result(rows)


@launch.command(epilog=examples("skyrl launch logs -f launches/mine"))
@click.argument("folder", metavar="LAUNCH")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the launch ends, or until Ctrl-C.")
@cluster_options
def logs(folder: str, follow: bool, cluster_file: str | None, settings: tuple[str, ...]) -> None:
    """Print the output of a launch. Ctrl-C stops the printing, not the run."""
    from skyrl.launchers.output import LaunchOutput

    cluster = read_cluster(cluster_file, settings)
    entry = _find_launch(folder, cluster)
    output = LaunchOutput(entry, launcher_of(entry.target, cluster))
    for text in output.follow() if follow else [output.new()]:
        click.echo(text, nl=False)


@launch.command(epilog=examples("skyrl launch stop launches/mine"))
@click.argument("folder", metavar="LAUNCH")
@click.option("--now", is_flag=True, help="Stop it immediately; progress since the last checkpoint is lost.")
@cluster_options
def stop(folder: str, now: bool, cluster_file: str | None, settings: tuple[str, ...]) -> None:
    """Stop a launch after it has saved a checkpoint.

    `skyrl run` with the same configuration resumes it.
    """
    cluster = read_cluster(cluster_file, settings)
    entry = _find_launch(folder, cluster)
    click.echo(launcher_of(entry.target, cluster).stop(entry, now=now))


@launch.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.option("--folder", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--ask", type=click.Path(path_type=Path))
@click.option("--ray", "on_ray", is_flag=True)
@click.option("--gpus", default=0)
@click.option("--slots", default=0)
@click.option("--interface", default="")
@click.option("--address-field", default="trainer.placement.ray_address")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def node(
    folder: Path,
    ask: Path | None,
    on_ray: bool,
    gpus: int,
    slots: int,
    interface: str,
    address_field: str,
    words: tuple[str, ...],
) -> None:
    """Run a launch's part on this node; the scripts of launches call it."""
    from skyrl.launchers.node import JobNode, RayShare, run_on_ray
    from skyrl.launchers.supervised import supervise

    job_node = JobNode.of(folder.absolute(), ask, os.environ)
    command = [sys.executable, "-m", "skyrl.cli", *words]
    if on_ray:
        share = RayShare(gpus=gpus, slots=slots, interface=interface)
        sys.exit(run_on_ray(command, job_node, share, address_field, os.environ))
    # Without Ray, the first node runs the command, and the others have nothing to do.
    sys.exit(supervise(command, job_node.folder, os.environ, job_node.stop_file) if job_node.rank == 0 else 0)


def read_cluster(file: str | None, settings: tuple[str, ...]) -> ClusterConfig:
    """The cluster that the options describe. Raises `ConfigError`."""
    from skyrl.config.cluster import load_cluster

    return load_cluster(file or (_FILE if os.path.exists(_FILE) else None), settings, os.environ)


def launcher_of(target: str, cluster: ClusterConfig) -> Launcher:
    """The launcher of a target."""
    from skyrl.launchers.local import LocalLauncher
    from skyrl.launchers.ray import RayLauncher
    from skyrl.launchers.slurm import SlurmLauncher

    python = cluster.python or sys.executable
    if target == "local":
        return LocalLauncher(cluster, python)
    return RayLauncher(cluster, python) if target == "ray" else SlurmLauncher(cluster, python)


def _find_launch(name: str, cluster: ClusterConfig) -> Launch:
    """The launch with this folder, or with this name in the folder of launches. Raises `UserError`."""
    from skyrl.launchers.job import RECORD, Launch

    inside = Path(cluster.folder) / name
    return Launch.read(inside if not (Path(name) / RECORD).exists() and inside.exists() else Path(name))


def shortest_path(folder: Path) -> str:
    """The path as short as it can be written here."""
    cwd = Path.cwd()
    return str(folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder)
