"""Surveys every machine of a running Ray cluster, and the connections between them."""

from __future__ import annotations

import contextlib
import socket
import threading
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
from skyrl.processes.ray.cluster import attach, clock_difference

EACH_PAIR = 8
"""Number of machines up to which every pair is measured; with more, each is paired with the next one by address."""

_PINGS = 20
_CHUNK = 1 << 18
_LASTS = 600.0
"""Seconds without a connection after which an `Echo` ends, if it is not closed."""

_nodes: Any = ray.nodes
_remote: Any = ray.remote


@frozen(kw_only=True)
class Link:
    """Measurements of the connection from one machine to another."""

    latency: float | None = None
    """Round-trip time in seconds, the shortest of several; None if no connection can be made."""

    bandwidth: float | None = None
    """Bytes per second of one connection."""

    problem: str = ""
    """Reason why no connection can be made."""


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
        self.probe: Any = _remote(num_cpus=0, max_restarts=0)(Probe).options(scheduling_strategy=strategy).remote()

    def look(self, readable: Sequence[str], shared: Sequence[str], marks: Sequence[str], deadline: float) -> Surveyed:
        """Survey the machine; `marks` are files that the command has made in the shared folders."""
        resources = self._node["Resources"]
        address = str(self._node["NodeManagerAddress"])
        slots, gpus = resources.get("slot", 0.0), resources.get("GPU", 0.0)
        try:
            requests = [self.probe.facts.remote(readable, shared), self.probe.sees.remote(marks)]
            facts, seen = ray.get(requests, timeout=max(1.0, deadline - time.monotonic()))
            unshared = [folder for folder, sees in zip(shared, seen, strict=True) if not sees]
            clock = clock_difference(self.probe.clock.remote, tries=5)
        except GetTimeoutError:
            return Surveyed(address=address, slots=slots, gpus=gpus, problem="it did not answer in time")
        except RayError as error:
            return Surveyed(address=address, slots=slots, gpus=gpus, problem=end_of(str(error), 300))
        return Surveyed(address=address, slots=slots, gpus=gpus, facts=facts, clock=clock, unshared=unshared)


def _links(machines: Mapping[str, _Machine], seconds: float) -> dict[tuple[str, str], Link]:
    """Measure the connections one after another, so that they do not disturb each other."""
    links = {}
    ports: dict[str, int] = {}
    for source, target in pairs(list(machines)):
        try:
            if target not in ports:
                ports[target] = ray.get(machines[target].probe.listen.remote(target), timeout=seconds)
            links[source, target] = ray.get(
                machines[source].probe.measure.remote(target, ports[target]), timeout=seconds
            )
        except (RayError, GetTimeoutError) as error:
            links[source, target] = Link(problem=end_of(str(error), 300))
    return links


def pairs(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of machines whose connection is measured, in both directions."""
    if len(addresses) <= EACH_PAIR:
        return list(permutations(addresses, 2))
    next_one = [*addresses[1:], addresses[0]]
    return [*zip(addresses, next_one, strict=True), *zip(next_one, addresses, strict=True)]


class Echo:
    """Answers `measure` at a free port of this address until it is closed, or for ten minutes without a connection. The
    data sent has no meaning, so that no secret is needed to connect to it.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=64)
        self._listener.settimeout(_LASTS)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="skyrl-echo", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed, or no connection in time
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_answer, args=(connection,), name="skyrl-echo", daemon=True).start()


def measure(address: str, port: int, *, patience: float = 5.0, seconds: float = 0.3) -> Link:
    """Measure the connection to an `Echo`. No answer within `patience` seconds is a problem; bandwidth is measured for
    `seconds`.
    """
    try:
        with socket.create_connection((address, port), patience) as connection:
            connection.settimeout(max(patience, 10 * seconds))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency = min(_ping(connection) for _ in range(_PINGS))
            return Link(latency=latency, bandwidth=_stream(connection, seconds))
    except OSError as error:
        return Link(problem=str(error))


def _ping(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(b"p")
    if not connection.recv(1):
        raise OSError("the connection was closed from the other side")
    return time.perf_counter() - began


def _stream(connection: socket.socket, seconds: float) -> float:
    """Bytes per second, measured until the other side has received the last byte."""
    chunk, sent, began = bytes(_CHUNK), 0, time.perf_counter()
    connection.sendall(b"s")
    while time.perf_counter() < began + seconds:
        connection.sendall(chunk)
        sent += len(chunk)
    connection.shutdown(socket.SHUT_WR)
    if not connection.recv(1):
        raise OSError("the connection was closed from the other side")
    return sent / (time.perf_counter() - began)


def _answer(connection: socket.socket) -> None:
    """Echo single bytes, then swallow a stream and confirm it."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_LASTS)
        while (request := connection.recv(1)) == b"p":
            connection.sendall(b"p")
        while request and connection.recv(_CHUNK):
            pass
        connection.sendall(b"s")
