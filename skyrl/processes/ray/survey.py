"""Surveys every machine of a running Ray cluster, and the connections between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from attrs import frozen
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl.processes.logs import end_of
from skyrl.processes.machine_facts import MachineFacts, facts_here
from skyrl.processes.network_probe import Echo, Link, measure
from skyrl.processes.ray.cluster import attach, clock_difference

EACH_PAIR = 8
"""Number of machines up to which every pair is measured; with more, each is paired with the next one by address."""

_nodes: Any = ray.nodes
_remote: Any = ray.remote


@frozen(kw_only=True)
class Surveyed:
    """One machine of the cluster."""

    address: str
    slots: float
    """Slots for processes, on machines without GPUs."""

    gpus: float
    """GPUs that Ray manages."""

    facts: MachineFacts | None = None
    """Facts about the machine; None if it did not answer."""

    problem: str = ""
    """Reason why the machine did not answer."""

    clock: float | None = None
    """Seconds that its clock is ahead of this machine's; 0 if within the measurement error."""

    unshared: Sequence[str] = ()
    """Folders in which it does not see the files that this machine writes."""

    @property
    def name(self) -> str:
        """Host name and address."""
        return f"{self.facts.host} ({self.address})" if self.facts else self.address


@frozen(kw_only=True)
class Survey:
    """Survey of a whole cluster."""

    machines: Sequence[Surveyed]
    links: Mapping[tuple[str, str], Link]
    """Measurements of the connection from the first address of a pair to the second, made at the first."""


class Probe:
    """Runs on a machine and looks around."""

    def __init__(self) -> None:
        self._echo: Echo | None = None

    def facts(self, readable: Sequence[str], writable: Sequence[str]) -> MachineFacts:
        return facts_here(readable, writable)

    def clock(self) -> float:
        return time.time()

    def sees(self, files: Sequence[str]) -> list[bool]:
        return [Path(file).exists() for file in files]

    def listen(self, address: str) -> int:
        self._echo = Echo(address)
        return self._echo.port

    def measure(self, address: str, port: int) -> Link:
        return measure(address, port)


def survey(address: str, *, readable: Sequence[str], shared: Sequence[str], seconds: float, field: str) -> Survey:
    """Survey every machine of the cluster at `address`, which `field` gives. Machines have `seconds` to start.

    `readable` are paths that each machine must have, `shared` existing folders that all machines must see with the same
    content: a file is made in each of them, looked for, and removed. Raises `ProcessError` if the cluster does not
    answer.
    """
    cluster = attach(address, seconds, field)
    try:
        alive = (node for node in _nodes() if node["Alive"])
        machines = [_Machine(node) for node in sorted(alive, key=lambda node: str(node["NodeManagerAddress"]))]
        with _marks(shared) as marks:
            deadline = time.monotonic() + seconds
            surveyed = [machine.look(readable, shared, marks, deadline) for machine in machines]
        answering = {item.address: machine for item, machine in zip(surveyed, machines, strict=True) if item.facts}
        return Survey(machines=surveyed, links=_links(answering, seconds))
    finally:
        cluster.close()


@contextlib.contextmanager
def _marks(folders: Sequence[str]) -> Iterator[list[str]]:
    """A new file in each of these folders, while the block lasts."""
    files = [Path(folder) / f".skyrl-doctor-{uuid4().hex}" for folder in folders]
    try:
        for file in files:
            file.touch()
        yield [str(file) for file in files]
    finally:
        for file in files:
            file.unlink(missing_ok=True)


class _Machine:
    """One machine, with a probe on it."""

    def __init__(self, node: Mapping[str, object]) -> None:
        """`node` is Ray's description of the machine."""
        self._node: Any = node
        strategy = NodeAffinitySchedulingStrategy(node_id=str(self._node["NodeID"]), soft=False)
        self._probe: Any = _remote(num_cpus=0, max_restarts=0)(Probe).options(scheduling_strategy=strategy).remote()

    def look(self, readable: Sequence[str], shared: Sequence[str], marks: Sequence[str], deadline: float) -> Surveyed:
        """Survey the machine; `marks` are files that the command has made in the shared folders."""
        resources = self._node["Resources"]
        address = str(self._node["NodeManagerAddress"])
        slots, gpus = resources.get("slot", 0.0), resources.get("GPU", 0.0)
        try:
            requests = [self._probe.facts.remote(readable, shared), self._probe.sees.remote(marks)]
            facts, seen = ray.get(requests, timeout=max(1.0, deadline - time.monotonic()))
            unshared = [folder for folder, sees in zip(shared, seen, strict=True) if not sees]
            clock = clock_difference(self._probe.clock.remote, tries=5)
        except GetTimeoutError:
            return Surveyed(address=address, slots=slots, gpus=gpus, problem="it did not answer in time")
        except RayError as error:
            return Surveyed(address=address, slots=slots, gpus=gpus, problem=end_of(str(error), 300))
        return Surveyed(address=address, slots=slots, gpus=gpus, facts=facts, clock=clock, unshared=unshared)

    def listen(self, address: str, seconds: float) -> int:
        """Start an `Echo` on the machine and return its port."""
        port: int = ray.get(self._probe.listen.remote(address), timeout=seconds)
        return port

    def measure(self, address: str, port: int, seconds: float) -> Link:
        """Measure the connection from the machine to this address."""
        link: Link = ray.get(self._probe.measure.remote(address, port), timeout=seconds)
        return link


def _links(machines: Mapping[str, _Machine], seconds: float) -> dict[tuple[str, str], Link]:
    """Measure the connections one after another, so that they do not disturb each other."""
    links = {}
    ports: dict[str, int] = {}
    for source, target in pairs(list(machines)):
        try:
            if target not in ports:
                ports[target] = machines[target].listen(target, seconds)
            links[source, target] = machines[source].measure(target, ports[target], seconds)
        except (RayError, GetTimeoutError) as error:
            links[source, target] = Link(problem=end_of(str(error), 300))
    return links


def pairs(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of machines whose connection is measured, in both directions."""
    if len(addresses) <= EACH_PAIR:
        return list(permutations(addresses, 2))
    next_one = [*addresses[1:], addresses[0]]
    return [*zip(addresses, next_one, strict=True), *zip(next_one, addresses, strict=True)]
