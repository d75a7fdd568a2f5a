"""The end of Ray's own processes: seen, told once, and the reason that every actor's end is given."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray._private.worker as ray_worker

from skyrl.errors import Stopped
from skyrl.processes.handles import ExitNotice
from skyrl.processes.ray import cluster as ray_cluster
from skyrl.processes.ray.cluster import Cluster
from skyrl.processes.ray.processes import RayProcesses
from skyrl.processes.ray.watch import Member, Watch
from skyrl.processes.shutdown import ShutdownSignal


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two processes in the place of Ray's."""
    started = {
        name: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        for name in ("gcs_server", "raylet")
    }
    node = SimpleNamespace(
        all_processes={name: [SimpleNamespace(process=process)] for name, process in started.items()}
    )
    monkeypatch.setattr(ray_worker, "_global_node", node)
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (signal.SIGKILL, "was killed (SIGKILL)"),
        (signal.SIGSEGV, "was killed (SIGSEGV)"),
        (None, "ended with exit code 0"),
    ],
)
def test_a_process_of_ray_that_ended_is_named_with_how(
    services: dict[str, subprocess.Popen[bytes]], tmp_path: Path, name: str, end: signal.Signals | None, message: str
) -> None:
    cluster, process = Cluster(folder=tmp_path), services[name]
    assert cluster.loss_reason() is None
    if end is None:
        process.communicate(b"\n")
    else:
        process.send_signal(end)
        process.wait()
    assert cluster.loss_reason() == f"Ray's own process {name} (process {process.pid}) {message}"


def processes_on(cluster: Cluster) -> RayProcesses:
    """`RayProcesses` as far as they look at their cluster."""
    processes = RayProcesses.__new__(RayProcesses)
    processes._cluster, processes.exit_notice = cluster, ExitNotice()
    return processes


def test_the_run_is_asked_to_stop_and_every_end_has_the_cause_of_all(
    services: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    processes, actor = processes_on(Cluster(folder=tmp_path)), cast("Any", None)
    with ShutdownSignal(grace=60) as shutdown, shutdown.in_loop():
        processes.exit_notice.listen(lambda: shutdown.request(f"Stopped because {processes.exit_notice.error}", 1))
        services["raylet"].kill()
        services["raylet"].wait()
        member = Member("engine", 0, actor, tmp_path / "log", processes._common_cause)
        member.died(RuntimeError("Owner's node has crashed."))
        assert "engine-0 (not started yet) died: Ray's own process raylet" in str(member.exit_notice.error)
        with pytest.raises(
            Stopped, match=r"Stopped because Ray's own process raylet \(process \d+\) was killed"
        ) as stop:
            shutdown.check()
    assert stop.value.exit_code == 1


def test_the_watch_looks_at_ray_without_being_asked(
    services: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    processes, messages = processes_on(Cluster(folder=tmp_path)), list[str]()
    heard = threading.Event()

    def hear() -> None:
        messages.append(str(processes.exit_notice.error))
        heard.set()

    processes.exit_notice.listen(hear)
    services["gcs_server"].kill()
    watch = Watch(0.04, processes._common_cause)
    services["gcs_server"].wait()
    heard.wait()
    watch.close()
    assert len(messages) == 1 and "gcs_server" in messages[0]


def test_a_head_that_is_gone_counts_as_lost_once_it_was_silent_for_long(
    monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    address = f"127.0.0.1:{closed_port}"
    with socket.create_server(("127.0.0.1", closed_port)):
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        cluster = Cluster()
        assert cluster.loss_reason() is None
    assert cluster.loss_reason() is None, "it may restart"
    now[0] += ray_cluster._UNREACHABLE_SECONDS - 1
    assert cluster.loss_reason() is None
    now[0] += 1
    assert f"the head of the Ray cluster at {address} cannot be reached for 30 s" in str(cluster.loss_reason())


def test_a_cluster_that_is_gone_is_not_asked_to_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.shutdown", lambda: pytest.fail("it would wait for the head"))
    unregistered = list[object]()
    monkeypatch.setattr("atexit.unregister", unregistered.append)
    Cluster().close(lost=True)
    assert unregistered == [ray_worker.shutdown]
