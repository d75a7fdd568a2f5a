"""`skyrl serve`: a model behind an endpoint that clients of OpenAI and Anthropic can use."""

from __future__ import annotations

import importlib.util

import click

from skyrl.cli.arguments import complete_word, split_words, warn
from skyrl.errors import UserError
from skyrl.processes.torch_environment import set_torch_environment


@click.command()
@click.argument("target", metavar="MODEL|RUN|CHECKPOINT")
@click.argument(
    "arguments", nargs=-1, metavar="[FILE...] [PATH=VALUE...]", type=click.UNPROCESSED, shell_complete=complete_word
)
@click.option("--step", type=click.IntRange(min=1), help="A checkpoint of RUN [default: its trained model].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any that is free.")
@click.option("--takes-weights", is_flag=True, help="Let a training run pause the model and replace its weights.")
def serve(target: str, arguments: tuple[str, ...], step: int | None, host: str, port: int, takes_weights: bool) -> None:
    """Answer requests to a model over HTTP, in OpenAI's protocol.

    MODEL, RUN and CHECKPOINT are those of `skyrl eval`. Samples are drawn as generator.sampling_params says, unless a
    request says otherwise. An address that other machines reach is served only with a token, in the variable
    SKYRL_ENDPOINT_TOKEN, which clients give as their API key.
    """
    missing = [name for name in ("starlette", "uvicorn", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'skyrl[serve]'")
    set_torch_environment()
    from skyrl.endpoint.doors import TOKEN_VARIABLE, Address, Doors
    from skyrl.processes.credentials import api_key
    from skyrl.tools.sampling_target import find_target
    from skyrl.tools.serving import serve as run

    files, overrides = split_words(arguments)
    address = Address(host=host, port=port, doors=Doors(token=api_key(TOKEN_VARIABLE)))
    model = find_target(target, step)
    run(model, files, overrides, address, takes_weights=takes_weights, warn=warn, say=click.echo)
    click.echo("The endpoint has stopped.")
