"""`skyrl serve`: serves a model over HTTP to OpenAI and Anthropic clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from skyrl.cli.command_line.arguments import CHANGES, STEP, TARGET, TRUST, split_words, warn
from skyrl.cli.command_line.commands import FieldsCommand, examples
from skyrl.cli.command_line.extras import require_packages
from skyrl.cli.command_line.service_options import HOST, port_option
from skyrl.errors import UserError
from skyrl.processes.torch_environment import set_torch_environment


@click.command(cls=FieldsCommand, epilog=examples("skyrl serve runs/mine --port 8000"))
@TARGET
@CHANGES
@STEP
@TRUST
@HOST
@port_option(8000)
@click.option(
    "--adapter",
    "named",
    multiple=True,
    metavar="NAME=FOLDER",
    help="A LoRA adapter for MODEL, served as NAME; may be repeated.",
)
@click.option("--takes-weights", is_flag=True, help="Let a training run pause the model and replace its weights.")
def serve(
    target: str,
    arguments: tuple[str, ...],
    step: int | None,
    host: str,
    port: int,
    named: tuple[str, ...],
    takes_weights: bool,
) -> None:
    """Serve a model over HTTP in OpenAI's and Anthropic's protocols.

    MODEL, RUN and CHECKPOINT mean the same as in `skyrl eval`. generator.sampling_params sets the sampling, unless a
    request says otherwise. An address that other machines can reach is served only with a token, in the variable
    SKYRL_ENDPOINT_TOKEN, which clients pass as their API key.

    FOLDER of an adapter is one that PEFT or a run stored, or a run that trained one. Requests that name the adapter as
    their model are answered by it, and all others by MODEL, whose weights are in memory once.
    """
    adapters = _adapters(named)
    require_packages("serve", "serve", "starlette", "uvicorn", "torch")
    set_torch_environment()
    from skyrl.endpoint.client_access import TOKEN_VARIABLE, Address, ClientAccess
    from skyrl.processes.credentials import api_key
    from skyrl.tools.sampling_target import find_target
    from skyrl.tools.serving import serve as run

    files, overrides = split_words(arguments)
    address = Address(host=host, port=port, access=ClientAccess(token=api_key(TOKEN_VARIABLE)))
    model = find_target(target, step)
    run(model, files, overrides, address, takes_weights=takes_weights, adapters=adapters, warn=warn, say=click.echo)
    click.echo("The endpoint has stopped.")


def _adapters(named: Sequence[str]) -> dict[str, str]:
    """Name -> folder of each adapter. Raises `UserError` for a missing folder, and for a name that is given twice."""
    adapters: dict[str, str] = {}
    for argument in named:
        name, equals, folder = argument.partition("=")
        if not (name and equals and folder):
            raise UserError(f"--adapter {argument}: give a name and a folder, as in --adapter math=runs/math/adapter")
        if name in adapters:
            raise UserError(f"--adapter {name}: two adapters have this name")
        path = Path(folder).expanduser()
        stored = [inside for inside in (path, path / "adapter") if (inside / "adapter_config.json").is_file()]
        if not stored:
            hint = "give a folder with PEFT's adapter_config.json"
            raise UserError(f"--adapter {name}: {path} contains no adapter: {hint}")
        adapters[name] = str(stored[0].absolute())
    return adapters
