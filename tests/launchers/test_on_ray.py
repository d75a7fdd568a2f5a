"""Runs as jobs of a real Ray cluster on this machine, with the job server of its dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nano_run import as_words, overrides
from tests.supervised_run import settings, toml_file

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray_jobs")]

ROOT = Path(__file__).parents[2]
WAITS = 400.0


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on, and that Ray gives to none of its workers."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
        return ports


def until(holds: Callable[[], object], describe: Callable[[], str]) -> None:
    """Wait until the condition holds; `describe` says what is reported where it never does."""
    deadline, pause = time.monotonic() + WAITS, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, describe()
        pause.wait(0.2)


def answers(address: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(f"{address}/api/version", timeout=5).status == 200)
    return False


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the dashboard of a cluster with one node."""
    folder = tmp_path_factory.mktemp("ray")
    port, dashboard, client, agent = free_ports(4)
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    head += ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", f"--ray-client-server-port={client}"]
    head += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    head += [f"--dashboard-agent-listen-port={agent}", "--min-worker-port=10002", "--max-worker-port=19999"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(head, env=environment, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{dashboard}"
    try:
        until(lambda: answers(address), (folder / "head.log").read_text)
        yield address
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Place:
    """A folder to launch from."""

    def __init__(self, folder: Path, dashboard: str) -> None:
        self.folder = folder
        (folder / "cluster.toml").write_text(f'[ray]\naddress = "{dashboard}"\n')

    def launch(self, *words: str) -> str:
        """Output of `skyrl launch`, which has to succeed."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "skyrl.cli", "launch", *words]
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def steps(self) -> list[int]:
        """Steps in the run's metrics."""
        file = self.folder / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]


@pytest.fixture
def site(tmp_path: Path, dashboard: str) -> Place:
    return Place(tmp_path, dashboard)


def words(nano: Path, site: Place, **changes: Any) -> list[str]:
    return as_words(overrides(nano, site.folder, trainer__run_name="mine", trainer__eval_interval=-1, **changes))


def test_a_job_of_ray_trains_to_its_end_and_its_output_is_followed(site: Place, nano: Path) -> None:
    site.launch("ray", *words(nano, site, trainer__max_training_steps=3))
    followed = site.launch("logs", "-f", "launches/mine")  # which ends with the run
    assert "finished" in site.launch("status")
    assert "3/3" in followed or "step 3" in followed, followed
    assert site.launch("logs", "launches/mine").strip().endswith(followed.strip()[-200:])
    assert site.steps()[-1] == 3


@pytest.mark.parametrize("kind", ["sft", "reward_model"])
def test_a_supervised_run_trains_as_a_job_of_ray(kind: str, site: Place, nano: Path) -> None:
    values = settings(nano, site.folder, kind, num_steps=2, run_name="mine")
    site.launch("ray", toml_file(site.folder / "run.toml", values))
    followed = site.launch("logs", "-f", "launches/mine")
    assert "finished" in site.launch("status"), followed
    assert site.steps()[-1] == 2


def test_a_job_of_ray_that_is_stopped_says_so(site: Place, nano: Path) -> None:
    endless: dict[str, Any] = {"trainer__epochs": 4000, "trainer__max_training_steps": 6000}
    site.launch("ray", *words(nano, site, **endless))
    until(lambda: len(site.steps()) > 2, lambda: site.launch("logs", "launches/mine"))
    site.launch("stop", "mine")
    until(lambda: "stopped" in site.launch("status"), lambda: site.launch("logs", "launches/mine"))
    steps = site.steps()
    assert steps == list(range(steps[0], steps[0] + len(steps)))
