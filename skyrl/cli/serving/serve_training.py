"""`skyrl serve-training`: a training service for Tinker clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from skyrl.cli.command_line.arguments import ARGUMENTS, STRICT, compose_arguments, refuse_nothing
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.extras import require_packages
from skyrl.errors import UserError
from skyrl.processes.torch_environment import set_torch_environment
from skyrl.tree.rules import Check


@click.command(
    "serve-training",
    cls=FieldsCommand,
    epilog=examples(
        "skyrl serve-training service.toml",
        "skyrl serve-training service.toml training_service.port=8020",
        "skyrl serve-training service.toml --add-client ada",
    ),
)
@ARGUMENTS
@STRICT
@click.option("--add-client", metavar="NAME", help="Print a token for a client, and exit; it is stored only as a hash.")
@click.option("--remove-client", metavar="NAME", help="Refuse a client's token from now on, and exit.")
def serve_training(arguments: tuple[str, ...], strict: bool, add_client: str | None, remove_client: str | None) -> None:
    """Train models for clients that hold the loop, in Tinker's protocol.

    Clients are programs with the package `tinker`: they send forward_backward, optim_step and sample. The base is
    trainer.policy.model.path; samples come from the engines of generator.inference_engine; training_service has the
    address and the limits. trainer.run_path is the service's folder: models, checkpoints, requests. The same command
    goes on after a stop or a crash.

    Without clients that have a token, only programs of this machine are answered.
    """
    refuse_nothing(arguments, "serve-training")
    require_packages(
        "serve-training", "training-service", "starlette", "uvicorn", "torch", "google.protobuf", "zstandard"
    )
    from skyrl.config.derive.run_kind import RunKind

    only_tokens = bool(add_client or remove_client)

    def checks(kind: RunKind) -> Sequence[Check[Any]]:
        if kind.name != "rl":
            raise UserError(f"kind = {kind.name}: a training service is configured as a reinforcement-learning run is")
        from skyrl.experiments.training_service import PREFLIGHT

        return () if only_tokens else PREFLIGHT

    set_torch_environment()
    composed = compose_arguments(arguments, strict=strict, also=checks)
    run = composed.config
    folder = Path(os.path.expanduser(run.trainer.folder("run_path"))).absolute()
    if only_tokens:
        from skyrl.training_service.store import add_client as add
        from skyrl.training_service.store import remove_client as remove

        if add_client:
            click.echo(add(folder, add_client))
        if remove_client:
            remove(folder, remove_client)
        return
    from skyrl.experiments.training_service import TrainingServiceExp

    TrainingServiceExp(run, composed.locations).serve(click.echo)
    click.echo("The training service has stopped; the same command goes on.")
