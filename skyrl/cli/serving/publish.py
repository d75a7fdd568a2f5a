"""`skyrl publish`: starts a server and publishes its address under a name that runs look up."""

from __future__ import annotations

import sys

import click

from skyrl.cli.command_line.commands import examples
from skyrl.cli.command_line.service_options import NAMES
from skyrl.errors import UserError


@click.command(epilog=examples("skyrl publish engines/0 http://10.0.0.7:8000 -- vllm serve MODEL --port 8000"))
@click.argument("name")
@click.argument("url")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@NAMES
@click.option(
    "--start-seconds",
    default=1800.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Time limit for the server to accept connections, in seconds.",
)
def publish(name: str, url: str, command: tuple[str, ...], names: str | None, start_seconds: float) -> None:
    """Start a server, and publish its address while it runs.

    For servers whose machine is not known in advance, such as an engine in a queue. A run finds that of the example as
    name:engines/0.
    """
    if not names:
        raise UserError("publish needs a name store: pass --names nfs:FOLDER, or set the variable SKYRL_NAMES")
    from skyrl.processes.naming.names import run_under_a_name
    from skyrl.processes.naming.stores import name_store

    sys.exit(run_under_a_name(name_store(names), name, url, command, start_seconds=start_seconds, say=click.echo))
