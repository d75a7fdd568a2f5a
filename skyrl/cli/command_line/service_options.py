"""Options of services: where they listen, and the name under which they publish their address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from skyrl.errors import UserError

HOST = click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")


def port_option(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Option --port of a service."""
    return click.option(
        "--port",
        default=default,
        show_default=True,
        type=click.IntRange(0, 65535),
        help="Port to listen on; 0 picks a free one.",
    )


NAMES = click.option(
    "--names", envvar="SKYRL_NAMES", metavar="STORE", help="Name store: nfs:FOLDER, etcd:HOST:PORT or ray:ADDRESS."
)
"""Option of commands that publish an address."""


def name_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options --name and --names of a service."""
    return click.option("--name", help="Publish the address under this name while the service runs.")(NAMES(function))


@contextmanager
def published(name: str | None, names: str | None, url: str) -> Iterator[None]:
    """Publish the address under the name within the context. Raises `UserError`, and `ProcessError` if it is taken."""
    if name is None:
        yield
        return
    if not names:
        raise UserError("--name needs a name store: pass --names nfs:FOLDER, or set the variable SKYRL_NAMES")
    from skyrl.processes.naming.names import Published
    from skyrl.processes.naming.stores import name_store

    with Published(name_store(names), name, url):
        click.echo(f"published as name:{name}")
        yield
