"""`skyrl run`: trains a model in this process, and continues after failures."""

from __future__ import annotations

import faulthandler
import os
import sys

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, STRICT, TRUST, compose_arguments, refuse_nothing, split_words
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.lasting_imports import lasting_imports

_HELP = """\
Train a model as configured.

What comes later wins:

\b
FILE            TOML, YAML or JSON; or the folder of a run
preset:NAME     settings that come with skyrl, such as preset:cuda
PATH=VALUE      set a field; PATH=env:NAME takes an environment variable
PATH+=VALUE     add to a list
~PATH           back to the default, whatever came before
PATH=@FILE      read a table from a file; @FILE alone a whole file

Ctrl-C and SIGTERM save a checkpoint first. The same command resumes from the last checkpoint; a run that has ended
is not trained again. A folder belongs to one run: changed settings need another one, or --new.

Exit codes: 0 trained, 1 failed (what was saved stays), 2 a mistake of yours (nothing was started), 75 stopped by
SIGTERM or its deadline and 130 by Ctrl-C (the same command resumes).
"""


@click.command(
    cls=FieldsCommand,
    help=_HELP,
    epilog=examples(
        "skyrl run run.toml",
        'skyrl run run.toml trainer.epochs=2 \'data.train_data=["a.jsonl", "b.jsonl"]\'',
        "skyrl run preset:cuda run.toml --new",
    ),
)
@ARGUMENTS
@STRICT
@TRUST
@click.option("--new", is_flag=True, help="Start a new run, in the next free folder beside the configured one.")
def run(arguments: tuple[str, ...], strict: bool, new: bool) -> None:
    """Train the model."""
    refuse_nothing(arguments, "run")
    if new:
        arguments = (*arguments, *_free_folder_arguments(arguments))
    from skyrl.config.derive.run_kind import RunKind
    from skyrl.config.loading.kinds import kind_of
    from skyrl.config.settings.trackers import lacks_of
    from skyrl.processes.progress import reported_wait
    from skyrl.processes.torch_environment import set_torch_environment

    composed = compose_arguments(arguments, strict=strict, also=RunKind.preflight_checks)
    set_torch_environment()
    with reported_wait("the import of torch and transformers"), lasting_imports():
        from skyrl.experiments.experiment import experiment_class
        from skyrl.runs.recovery import attempts
        from skyrl.runs.session import RunSession
        from skyrl.runs.summary import summary

    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    kind = kind_of(composed.config)
    if any(origin.kind == "rule" for origin in composed.origins.get(kind.path("logger"), ())):
        reason = next(lack for lack, _ in lacks_of("wandb", mode=composed.config.trainer.trackers.wandb.mode))
        click.echo(f"Metrics go to the console: {reason} (the default of {kind.path('logger')} is wandb).", err=True)
    with reported_wait("the import of the modules that the run uses"), lasting_imports():
        make = experiment_class(composed.config)
    for attempt in attempts(composed.config):
        experiment = make(attempt.run)
        experiment.is_another_try, experiment.locations = attempt.is_another_try, composed.locations
        with attempt:
            trained = RunSession(experiment).run()
    if not trained:
        click.echo(
            f"This run is already finished ({experiment.checkpoints.folder} has its last step): nothing was trained.\n"
            f"To train again, choose other folders ({kind.path('run_path')}, {kind.path('ckpt_path')}) or "
            f"delete these; to train longer, raise {' or '.join(kind.length)}."
        )
    for line in summary(experiment.cfg, experiment.folder):
        click.echo(line)


def _free_folder_arguments(arguments: tuple[str, ...]) -> list[str]:
    """Arguments that give the run folders which belong to no other one; the first is printed. Folders that are named
    after the run get a new name of the run.
    """
    from skyrl.config import compose
    from skyrl.config.loading.kinds import kind_of
    from skyrl.runs.run_lock import free_folders

    composed = compose(*split_words(arguments), environ=os.environ)
    folders, kind = free_folders(composed.config), kind_of(composed.config)
    click.echo(f"New run in {next(iter(folders.values()))}.", err=True)
    run_path = kind.path("run_path")
    if any(origin.kind == "rule" for origin in composed.origins.get(run_path, ())):
        folders[kind.path("run_name")] = folders.pop(run_path).removeprefix("runs/")
    return [f"{path}={value}" for path, value in folders.items()]
