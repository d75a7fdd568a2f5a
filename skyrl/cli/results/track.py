"""`skyrl track`: delivers the metrics of a run to a tracker afterwards."""

from __future__ import annotations

from pathlib import Path

import click

from skyrl.cli.command_line.commands import examples
from skyrl.config.settings.trackers import TRACKERS

SERVICES = [name for name, facts in TRACKERS.items() if not facts.in_run]
"""Names of the trackers that read the run's folder."""


@click.command(epilog=examples("skyrl track runs/mine --to wandb"))
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE...]")
@click.option("--to", "service", type=click.Choice(SERVICES), required=True, help="The tracker.")
@click.option("--new", is_flag=True, help="Create a new run there with every step, regardless of earlier deliveries.")
def track(run: Path, overrides: tuple[str, ...], service: str, new: bool) -> None:
    """Deliver metrics and samples of RUN to a tracker.

    Delivery starts at the first step that the tracker lacks. RUN is the folder of a run that has ended, or that used
    other trackers. The tracker uses the run's settings; PATH=VALUE changes them, such as
    trainer.trackers.wandb.mode=offline.
    """
    from skyrl.tools.track import deliver

    delivered = deliver(run.absolute(), service, overrides, new=new)
    click.echo(f"{service} has the steps of {run} up to step {delivered}.")
