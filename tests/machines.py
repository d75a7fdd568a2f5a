"""Machines for tests: network namespaces with addresses and host names of their own, and a Ray cluster across them.

They share disks and processes' ids, as the machines of a container platform may. The network between them is
`network_switch.py`, which cuts, loses and delays.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from skyrl.processes.orphans import HOST
from tests.network_switch import Rules
from tests.processes.clusters import soon

ROOT = Path(__file__).parents[1]
PORT = 6379

_SETTINGS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_worker_niceness": "0",  # else whatever runs beside the tests has the cores
}
"""Ray takes a machine for dead after about as many seconds as `failures`, and not after a minute as by default."""


RAY_PORTS = (20000, 20999)
"""Every port at which Ray listens, besides that of the head."""

_PORTS_OF_RAY = (
    *("--node-manager-port", "20000", "--object-manager-port", "20001", "--runtime-env-agent-port", "20002"),
    *("--metrics-export-port", "20003", "--dashboard-agent-grpc-port", "20004"),
    *("--dashboard-agent-listen-port", "20005", "--min-worker-port", "20100", "--max-worker-port", "20999"),
)


_RUNS = "Ray runtime started"
_TRIES = 3
_AHEAD = ("sh", "-c", 'echo -8 > /proc/self/autogroup; exec "$@"', "sh")
"""Ray gives up a start after 30 s, however much runs beside the tests: it goes first, and is tried again."""


def _inherited() -> dict[str, str]:
    """The environment of the tests, without names of interfaces: a vLLM engine of this process asked for loopback."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}


class Machine:
    """One namespace."""

    def __init__(self, name: str, address: str, environment: Mapping[str, str]) -> None:
        self.name, self.address = name, address
        self.namespace = f"skyrl-{os.getpid()}-{name}"
        self._environment = dict(environment)
        self._started: list[subprocess.Popen[bytes]] = []
        subprocess.run(["ip", "netns", "add", self.namespace], check=True)

    def start(self, command: Sequence[str], output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command there, which writes into this file and ends with `kill`."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *named, *command],
                env={**_inherited(), **self._environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=ROOT,
            )
        self._started.append(process)
        return process

    @property
    def processes(self) -> list[psutil.Process]:
        """Everything that runs there."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        processes = []
        for pid in map(int, listed.stdout.split()):
            try:
                processes.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
        return processes

    @property
    def actors(self) -> list[str]:
        """Marks of a run's processes, and of all that they started."""
        marks = []
        for process in self.processes:
            try:
                marks.append(process.environ().get(HOST, ""))
            except psutil.Error:
                continue
        return [mark for mark in marks if mark]

    def kill(self) -> None:
        """All of its processes at once, as when the power fails."""
        while processes := self.processes:
            for process in processes:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=5)
        for started in self._started:
            started.wait()

    def remove(self) -> None:
        """End everything there, and the namespace."""
        self.kill()
        subprocess.run(["ip", "netns", "del", self.namespace], check=True)


class Machines:
    """Machines with a network; a context manager after which nothing of them is left."""

    def __init__(self, *names: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sk-", dir="/tmp"))  # short, for the paths of Ray's sockets
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        environment = {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._all = [Machine(name, f"10.77.0.{number}", environment) for number, name in enumerate(names, start=1)]
        self._switch = subprocess.Popen(
            [sys.executable, "-I", str(ROOT / "tests" / "network_switch.py")]
            + [f"{machine.namespace}={machine.address}" for machine in self._all],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._wait_for_the_switch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self._all:
            machine.remove()
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.close()
        self._switch.wait(10)
        self._switch.stdout.close()
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

    def __getitem__(self, name: str) -> Machine:
        return next(machine for machine in self._all if machine.name == name)

    @property
    def head(self) -> str:
        """Address of Ray's head, on the first machine."""
        return f"{self._all[0].address}:{PORT}"

    def network(self, **rules: Any) -> None:
        """Change the network to these `Rules`; machines that are `cut` are given by their names."""
        names = rules.pop("cut", [])
        network_rules = Rules(cut=[self[name].address for name in names], **rules)
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(vars(network_rules)).encode() + b"\n")
        self._switch.stdin.flush()
        self._wait_for_the_switch()

    def join_ray(
        self,
        machine: Machine,
        *,
        slots: int = 1,
        failures: int = 6,
        inside: Sequence[str] = (),
        variables: Mapping[str, str] = {},
    ) -> None:
        """Ray on one machine, with these environment variables; returns when it is in the cluster. `inside` is a
        command that starts the one after it.
        """
        role = (
            ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", str(self.folder / "ray")]
            if machine is self._all[0]
            else ["--address", self.head]
        )
        command = [
            *_AHEAD,
            *inside,
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
            *("--node-ip-address", machine.address, "--num-cpus", "0", *_PORTS_OF_RAY),
            *("--resources", json.dumps({"slot": slots}), "--object-store-memory", "100000000"),
        ]
        environment = {**_SETTINGS, **variables, "RAY_health_check_failure_threshold": str(failures)}
        for _ in range(_TRIES):
            output = self.folder / f"ray-{machine.name}-{secrets.token_hex(2)}.txt"
            started = machine.start(command, output, **environment)
            if soon(lambda: _RUNS in output.read_text() or started.poll() is not None, 120) and started.poll() is None:  # noqa: B023 - called before the next round
                return
        raise AssertionError(output.read_text())

    def _wait_for_the_switch(self) -> None:
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == b"done\n", "the network ended"
