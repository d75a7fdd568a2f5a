"""Finds a name store by its address, which the variable SKYRL_NAMES or the option --names gives.

nfs:/shared/names           a folder that all machines mount
etcd:10.0.0.1:2379          an etcd server
ray:10.0.0.1:6379           a Ray cluster; `ray:auto` is that of this machine, or the one this process has joined
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from skyrl.errors import UserError
from skyrl.processes.credentials import api_key
from skyrl.processes.naming.names import NameStore, wait_for

VARIABLE = "SKYRL_NAMES"
PREFIX = "name:"
"""Beginning of an address that is a name."""


@cache
def name_store(address: str) -> NameStore:
    """The store at an address. Raises `UserError` for an address of an unknown form."""
    kind, _, location = address.partition(":")
    match kind:
        case "nfs" if location:
            from skyrl.processes.naming.names_on_disk import NamesOnDisk

            return NamesOnDisk(Path(location))
        case "etcd" if location:
            from skyrl.processes.naming.names_in_etcd import NamesInEtcd

            return NamesInEtcd(location)
        case "ray" if location:
            from skyrl.processes.naming.names_in_ray import NamesInRay

            return NamesInRay(location)
    raise UserError(f"{address!r} is not a name store: write nfs:FOLDER, etcd:HOST:PORT or ray:ADDRESS")


def located(address: str) -> str | None:
    """The address of a service: `name:NAME` is looked up now, any other address is returned. None for a name that
    is not published.

    Raises `UserError` if no store is configured, `ProcessError` if it cannot be reached.
    """
    return _store_of(address).get(address.removeprefix(PREFIX)) if address.startswith(PREFIX) else address


def awaited(address: str, seconds: float) -> str:
    """The address of a service, as `located` finds it; waits for a name that is not published yet.

    Raises `UserError` if no store is configured, `ProcessError` if the name is not published in time.
    """
    if not address.startswith(PREFIX):
        return address
    return wait_for(_store_of(address), address.removeprefix(PREFIX), seconds)


def _store_of(address: str) -> NameStore:
    store = api_key(VARIABLE)
    if store is None:
        raise UserError(f"{address} is a service name, but no name store is set: export {VARIABLE}=nfs:FOLDER")
    return name_store(store)
