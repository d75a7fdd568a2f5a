from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc  # type: ignore[import-untyped]  # no stubs
import psutil
import pytest
import ray

from skyrl.errors import ProcessError
from skyrl.processes.handles import Deadlines
from skyrl.processes.logs import BOUNDS_OF_RAY
from skyrl.processes.orphans import RUN, sweep, tagged
from skyrl.processes.ray.cluster import attach
from skyrl.processes.ray.processes import RayProcesses
from tests.long_cases import long_except
from tests.processes.clusters import family, layout, lives, soon
from tests.processes.conftest import SharedCluster

pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(shared_cluster: SharedCluster) -> Path:
    """The private folder of a running cluster of our own."""
    shared_cluster.processes()
    return shared_cluster.folder


def test_everything_listens_on_loopback_alone(folder: Path) -> None:
    addresses = {ip for pid in {*family(os.getpid()), *tagged(RUN, folder.name, folder)} for ip in _listening(pid)}
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_stranger_without_the_token_is_refused(folder: Path, token: str | None) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        _list_nodes(token)
    assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_who_has_the_token_is_not_refused(folder: Path) -> None:
    assert _list_nodes((folder / "token").read_text())


def test_only_this_user_can_read_the_token(folder: Path) -> None:
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_token_and_the_mark_are_not_left_in_the_environment(folder: Path) -> None:
    assert {"RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", RUN} & set(os.environ) == set()


def test_a_second_cluster_in_one_process_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="connected to a Ray cluster already"):
        RayProcesses(layout(rank=1), deadlines=Deadlines(), address=None, logs=tmp_path, device="cpu")
    with pytest.raises(ProcessError, match="Start the head first, or correct trainer.placement.ray_address"):
        attach("127.0.0.1:1", 60)
    assert ray.is_initialized()


def test_no_service_of_ray_runs_that_nobody_uses(folder: Path) -> None:
    pids = tagged(RUN, folder.name, folder)
    commands = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]) if process.pid in pids
    ]
    assert any("raylet" in command for command in commands)
    services = ("dashboard.py", "log_monitor.py", "monitor.py")
    assert [command for command in commands if any(service in command for service in services)] == []


def test_every_log_of_ray_is_bounded(folder: Path) -> None:
    processes = [psutil.Process(pid) for pid in tagged(RUN, folder.name, folder)]
    environments = [process.environ() for process in processes if "raylet" in process.name()]
    assert [{name: environment[name] for name in BOUNDS_OF_RAY} for environment in environments] == [BOUNDS_OF_RAY]


def _listening(pid: int) -> set[str]:
    """The addresses on which a process listens: none where it has ended since it was found."""
    try:
        connections = psutil.Process(pid).net_connections()
    except psutil.NoSuchProcess:
        return set()
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def _list_nodes(token: str | None) -> bytes:
    """Asks the head what a client asks first."""
    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        call = channel.unary_unary(
            "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
            request_serializer=lambda message: message,
            response_deserializer=lambda message: message,
        )
        header = None if token is None else (("authorization", f"Bearer {token}"),)
        answer: bytes = call(b"", timeout=30, metadata=header)
        return answer


@pytest.mark.long
@pytest.mark.parametrize("end", long_except([signal.SIGKILL, signal.SIGINT], signal.SIGKILL))
def test_a_driver_that_is_ended_leaves_nothing(tmp_path: Path, end: signal.Signals) -> None:
    driver, started, folder = _start_driver(tmp_path)
    assert all(lives(pid) for pid in started) and folder.exists()
    driver.send_signal(end)
    driver.communicate(timeout=120)
    assert soon(lambda: not [pid for pid in started if lives(pid)])
    assert soon(lambda: not folder.exists())
    assert tagged(RUN, folder.name, folder) == []


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder for temporary files that no other test's cluster sweeps, with a name short enough for sockets."""
    path = Path("/tmp") / secrets.token_hex(3)
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@pytest.mark.long
def test_what_a_killed_driver_left_is_swept_at_the_next_start(tmp_path: Path, root: Path) -> None:
    driver, started, folder = _start_driver(tmp_path, root)
    keepers = [child for child in psutil.Process(driver.pid).children() if folder.name in child.cmdline()]
    for pid in [*[reaper.pid for reaper in keepers], driver.pid]:  # nobody is left to clean up
        os.kill(pid, signal.SIGKILL)
    driver.communicate(timeout=120)
    assert keepers and folder.exists()
    assert sweep(root) == [folder]
    assert not folder.exists()
    assert soon(lambda: not [pid for pid in started if lives(pid)])


def _start_driver(logs: Path, root: Path | None = None) -> tuple[subprocess.Popen[str], list[int], Path]:
    program = [sys.executable, "-m", "tests.processes.driver", str(logs)]
    environment = os.environ | ({"TMPDIR": str(root)} if root else {})
    driver = subprocess.Popen(
        program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    line = driver.stdout.readline()
    if not line:
        raise AssertionError(driver.communicate(timeout=60)[1])
    report = json.loads(line)
    return driver, report["started"], Path(report["folder"])
