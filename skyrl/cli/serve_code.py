"""`skyrl serve-code`: the sandbox over HTTP, for the environments `code` and `lcb`."""

from __future__ import annotations

import os

import click

from skyrl.cli.extras import require_packages
from skyrl.cli.services import HOST, name_options, port_option, published


@click.command("serve-code")
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
    """Run programs that policies write, each in a sandbox, for runs on other machines.

    Set environment.skyrl_gym.code_url of a run to the address that is printed. An address that other machines can reach
    is served only with a token, in the variable SKYRL_CODE_TOKEN, which the run needs, too.
    """
    require_packages("serve-code", "code", "starlette", "uvicorn")
    from typing import cast

    from skyrl.envs.services.code_service import code_app
    from skyrl.envs.services.remote_sandbox import TOKEN_VARIABLE
    from skyrl.processes.credentials import api_key
    from skyrl.processes.service import listen, serve
    from skyrl.sandbox.sandbox import Sandbox
    from skyrl.sandbox.tiers import Tier

    token = api_key(TOKEN_VARIABLE)
    with listen(host, port, token, TOKEN_VARIABLE) as bound:
        sandbox = Sandbox("auto" if tier == "auto" else cast(Tier, tier))
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{bound.getsockname()[1]}/run"
        click.echo(f"programs in the tier {sandbox.tier} at {url}")
        try:
            with published(name, names, url):
                serve(code_app(sandbox, at_once or os.cpu_count() or 1, token), bound)
        finally:
            sandbox.close()
    click.echo("The code service has stopped.")
