"""Options with which a service publishes its address under a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from skyrl.errors import UserError


def name_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options --name and --names of a service."""
    for option in (
        click.option(
            "--names",
            envvar="SKYRL_NAMES",
            metavar="STORE",
            help="Name store: nfs:FOLDER, etcd:HOST:PORT or ray:ADDRESS.",
        ),
        click.option("--name", help="Publish the address under this name while the service runs."),
    ):
        function = option(function)
    return function


@contextmanager
def published(name: str | None, names: str | None, url: str) -> Iterator[None]:
    """Publish the address under the name within the context. Raises `UserError`, and `ProcessError` if it is taken."""
    if name is None:
        yield
        return
    if not names:
        raise UserError("--name needs a name store: pass --names nfs:FOLDER, or set the variable SKYRL_NAMES")
    from skyrl.processes.name_stores import name_store
    from skyrl.processes.names import Published

    with Published(name_store(names), name, url):
        click.echo(f"published as name:{name}")
        yield
