"""Names in a real etcd, which is also killed and started again, and in a real Ray cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl.errors import ProcessError
from skyrl.processes.naming.names import Entry, NameStore, Published, wait_for
from skyrl.processes.naming.names_in_etcd import NamesInEtcd

ROOT = Path(__file__).parents[2]


def until(holds: Callable[[], bool]) -> None:
    waiting = threading.Event()
    while not holds():
        waiting.wait(0.05)


class Etcd:
    """One server with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, (self.client, self._peer) = folder, _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.client, self._peer))
        words = ["etcd", "--name", "a", "--data-dir", str(self._folder / "data")]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        words += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"a={peer}"]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        until(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self.client}/health", timeout=5).close()
            return True
        return False


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    server.start()
    yield server
    server.kill()


def obeys_the_contract(store: NameStore) -> None:
    """One owner at a time, found as long as it has the name."""
    assert store.get("judge") is None
    with Published(store, "judge", "http://a:1"), Published(store, "jury/0", "b"), Published(store, "jury/1", "c"):
        assert store.get("judge") == "http://a:1"
        assert store.find("jury/") == {"jury/0": "b", "jury/1": "c"}
        assert set(store.find("")) == {"judge", "jury/0", "jury/1"}
        assert not store.add("judge", Entry("x", "another"), 10)
        assert not store.renew("judge", Entry("x", "another"), 10)
        store.remove("judge", "another")
        assert wait_for(store, "judge", 0) == "http://a:1"
    assert store.find("") == {}
    assert store.add("judge", Entry("short", "one"), 1)
    until(lambda: store.get("judge") is None)  # its lease is over
    assert not store.renew("judge", Entry("short", "one"), 1)
    assert store.add("judge", Entry("next", "two"), 10)
    assert store.get("judge") == "next"


@pytest.mark.long
@pytest.mark.needs("etcd")
def test_names_in_etcd_have_one_owner_and_a_lease(etcd: Etcd) -> None:
    obeys_the_contract(NamesInEtcd(f"127.0.0.1:{etcd.client}"))


@pytest.mark.long
@pytest.mark.needs("etcd")
def test_a_name_survives_an_etcd_that_is_killed_and_started_again(etcd: Etcd) -> None:
    store = NamesInEtcd(f"127.0.0.1:{etcd.client}")
    with Published(store, "judge", "http://a:1", seconds=2) as published:
        assert store.add("dead", Entry("http://dead:1", "dead"), 2)  # nobody renews it
        etcd.kill()
        with pytest.raises(ProcessError, match="cannot be reached"):
            store.get("judge")
        etcd.start()
        assert wait_for(store, "judge", 60) == "http://a:1"
        until(lambda: store.get("dead") is None)
        assert store.get("judge") == "http://a:1"
        assert not published.lost.is_set()


IN_RAY = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from skyrl.processes.naming.names_in_ray import NamesInRay
from tests.processes.test_names_in_services import obeys_the_contract
from skyrl.processes.naming.names import Entry
if sys.argv[2] == "contract":
    obeys_the_contract(NamesInRay(sys.argv[1]))
    NamesInRay(sys.argv[1]).add("left", Entry("here", "one"), 600)
print(NamesInRay(sys.argv[1]).get("left"))
"""


@pytest.mark.long
def test_names_in_ray_have_one_owner_and_a_lease_and_outlive_the_process(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "PYTHONPATH": str(ROOT)}
    [port] = _free_ports(1)
    address = f"127.0.0.1:{port}"
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    head += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "1", "--disable-usage-stats"]
    with (tmp_path / "ray.log").open("wb") as log:
        process = subprocess.Popen(head, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: _listens(port))
        waits = [sys.executable, "-m", "skyrl.processes.ray.nodes", address, "1", "120"]
        subprocess.run(waits, env=environment, check=True)
        for check in ("contract", "look"):
            words = [sys.executable, "-c", IN_RAY, address, check]
            result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
            assert result.stdout.splitlines()[-1:] == ["here"], result.stderr
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
