"""`skyrl track`: the metrics of a run, delivered to a tracker after the fact."""

from __future__ import annotations

from pathlib import Path

import click

SERVICES = ("wandb", "tensorboard", "mlflow", "swanlab")
"""Trackers beside the run, named here so that no other command waits for the import of the configuration."""


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE...]")
@click.option("--to", "service", type=click.Choice(SERVICES), required=True, help="The tracker.")
@click.option("--new", is_flag=True, help="Make a new run there, with every step, whatever was delivered before.")
def track(run: Path, overrides: tuple[str, ...], service: str, new: bool) -> None:
    """Deliver the metrics, samples and evaluations of RUN to a tracker, from the first step that it lacks.

    RUN is the folder of a run that is over, or was tracked by others. Settings of the tracker are those of the run;
    PATH=VALUE changes them, such as trainer.trackers.wandb.mode=offline.
    """
    from skyrl.tools.track import deliver

    delivered = deliver(run.absolute(), service, overrides, new=new)
    click.echo(f"{service} has the steps of {run} up to {delivered}.")
