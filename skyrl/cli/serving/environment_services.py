"""`skyrl serve-code`, `serve-retriever` and `serve-reward`: what environments of runs on other machines call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from skyrl.cli.command_line.commands import examples
from skyrl.cli.command_line.extras import require_packages
from skyrl.cli.command_line.service_options import HOST, name_options, port_option, published

if TYPE_CHECKING:
    import socket


@click.command("serve-code", epilog=examples("skyrl serve-code --port 8002 --at-once 4"))
@HOST
@port_option(8002)
@click.option(
    "--at-once", type=click.IntRange(min=1), help="Number of programs to run at once [default: one per core]."
)
@click.option(
    "--tier",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "process", "namespace", "bwrap"]),
    help="How programs are isolated (SECURITY.md).",
)
@name_options
def serve_code(host: str, port: int, at_once: int | None, tier: str, name: str | None, names: str | None) -> None:
    """Run programs of policies, for runs on other machines.

    Each runs in a sandbox.

    Set environment.skyrl_gym.code_url of a run to the address that is printed. An address that other machines can reach
    is served only with a token, in the variable SKYRL_CODE_TOKEN, which the run needs, too.
    """
    require_packages("serve-code", "code", "starlette", "uvicorn")
    from skyrl.envs.services.code_service import code_app
    from skyrl.envs.services.remote_sandbox import TOKEN_VARIABLE
    from skyrl.processes.service import serve
    from skyrl.sandbox.sandbox import Sandbox
    from skyrl.sandbox.tiers import Tier

    with _listening(host, port, TOKEN_VARIABLE, "run") as (bound, url, token):
        sandbox = Sandbox("auto" if tier == "auto" else cast(Tier, tier))
        click.echo(f"programs in the tier {sandbox.tier} at {url}")
        try:
            with published(name, names, url):
                serve(code_app(sandbox, at_once or os.cpu_count() or 1, token), bound)
        finally:
            sandbox.close()
    click.echo("The code service has stopped.")


@click.command("serve-retriever", epilog=examples("skyrl serve-retriever corpus.jsonl --port 8000"))
@click.argument("corpus", type=click.Path(path_type=Path))
@HOST
@port_option(8000)
@name_options
def serve_retriever(corpus: Path, host: str, port: int, name: str | None, names: str | None) -> None:
    """Answer searches over CORPUS by BM25.

    CORPUS is a JSONL file with the texts `id` and `contents` in each line.

    Set environment.skyrl_gym.search.search_url of a run to the address that is printed. An address that other machines
    can reach is served only with a token, in the variable SKYRL_RETRIEVER_TOKEN, which the run needs, too.
    """
    require_packages("serve-retriever", "search", "bm25s", "starlette", "uvicorn")
    from skyrl.envs.search import TOKEN_VARIABLE
    from skyrl.envs.services.retriever import SearchIndex, read_corpus, retriever_app
    from skyrl.processes.service import serve

    with _listening(host, port, TOKEN_VARIABLE, "retrieve") as (bound, url, token):
        index = SearchIndex(read_corpus(corpus))
        click.echo(f"{len(index)} documents at {url}")
        with published(name, names, url):
            serve(retriever_app(index, token), bound)
    click.echo("The retriever has stopped.")


@click.command("serve-reward", epilog=examples("skyrl serve-reward runs/reward --device cuda"))
@click.argument("model")
@HOST
@port_option(8001)
@click.option(
    "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]), help="Device to compute on."
)
@name_options
def serve_reward(model: str, host: str, port: int, device: str, name: str | None, names: str | None) -> None:
    """Score chats with MODEL, a sequence classifier.

    MODEL is a folder, a hub name, or a run of reward models, and has one label.

    Set environment.skyrl_gym.reward_model.url of a run to the address that is printed. An address that other machines
    can reach is served only with a token, in the variable SKYRL_REWARD_TOKEN, which the run needs, too.
    """
    require_packages("serve-reward", "reward", "starlette", "uvicorn", "torch")
    from skyrl.envs.builtin.reward_model import TOKEN_VARIABLE
    from skyrl.envs.services.reward_service import reward_app
    from skyrl.models.saving.reward_model import RewardModel
    from skyrl.processes.service import serve
    from skyrl.tools.sampling_target import scoring_model

    folder = scoring_model(model)
    with _listening(host, port, TOKEN_VARIABLE, "score") as (bound, url, token):
        scorer = RewardModel(folder, device)
        click.echo(f"{model} at {url}")
        with published(name, names, url):
            serve(reward_app(scorer, model, token), bound)
    click.echo("The reward service has stopped.")


@contextmanager
def _listening(host: str, port: int, variable: str, route: str) -> Iterator[tuple[socket.socket, str, str | None]]:
    """Context with a bound socket, the address of the route on it, and the token in the environment variable."""
    from skyrl.processes.credentials import api_key
    from skyrl.processes.service import listen

    token = api_key(variable)
    with listen(host, port, token, variable) as bound:
        url_host = f"[{host}]" if ":" in host else host
        yield bound, f"http://{url_host}:{bound.getsockname()[1]}/{route}", token
