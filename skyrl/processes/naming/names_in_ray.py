"""Names in a Ray cluster: AReaL's name resolution of type `ray`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from skyrl.errors import ProcessError
from skyrl.processes.naming.names import Entry
from skyrl.processes.ray.cluster import attach

_ACTOR = "skyrl-names"
_NAMESPACE = "skyrl"
_SECONDS = 20.0


class _Table:
    """The names, in one actor of the cluster, whose clock alone measures the leases."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, str, float]] = {}  # name -> value, owner, end of its lease

    def add(self, name: str, value: str, owner: str, seconds: float) -> bool:
        """Publish the name. Returns whether it now belongs to this owner."""
        if name in self.find(name):
            return False
        self._names[name] = value, owner, time.monotonic() + seconds
        return True

    def renew(self, name: str, value: str, owner: str, seconds: float) -> bool:
        """Renew the name. Returns whether it still belongs to this owner."""
        if name not in self.find(name) or self._names[name][1] != owner:
            return False
        self._names[name] = value, owner, time.monotonic() + seconds
        return True

    def remove(self, name: str, owner: str) -> None:
        """Withdraw the name if it belongs to this owner."""
        if name in self._names and self._names[name][1] == owner:
            del self._names[name]

    def find(self, prefix: str) -> dict[str, str]:
        """Living names with this prefix, and their values."""
        now = time.monotonic()
        self._names = {name: alias for name, alias in self._names.items() if alias[2] >= now}
        return {name: item[0] for name, item in sorted(self._names.items()) if name.startswith(prefix)}


class NamesInRay:
    """Name store in an actor, which the first user starts and which lives as long as the cluster."""

    def __init__(self, address: str) -> None:
        """`address` is that of the cluster's head, unless this process is in a cluster already."""
        if not ray.is_initialized():
            attach(address, _SECONDS, "the store of names")
        make: Any = ray.remote(num_cpus=0)(_Table)
        self._actor: Any = make.options(
            name=_ACTOR, namespace=_NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote()

    def add(self, name: str, entry: Entry, seconds: float) -> bool:
        return bool(self._ask(self._actor.add, name, entry.value, entry.owner, seconds))

    def renew(self, name: str, entry: Entry, seconds: float) -> bool:
        return bool(self._ask(self._actor.renew, name, entry.value, entry.owner, seconds))

    def remove(self, name: str, owner: str) -> None:
        self._ask(self._actor.remove, name, owner)

    def find(self, prefix: str) -> Mapping[str, str]:
        names: dict[str, str] = self._ask(self._actor.find, prefix)
        return names

    def get(self, name: str) -> str | None:
        return self.find(name).get(name)

    def _ask(self, method: Any, *words: Any) -> Any:
        get: Callable[..., Any] = ray.get
        try:
            return get(method.remote(*words), timeout=_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ProcessError(f"the names in the Ray cluster cannot be reached: {type(error).__name__}") from None
