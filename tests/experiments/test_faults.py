"""A run on Ray, its processes killed or stopped at any moment: one message names who it was, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl.processes.orphans import RUN, private_root, tagged
from tests.nano_run import overrides

HEARTBEAT = 8.0
PATIENCE = 240.0

ON_RAY = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
    "trainer__placement__heartbeat_timeout_seconds": HEARTBEAT,
    "generator__inference_engine__max_engine_restarts": 0,
    "trainer__epochs": 200,
    "trainer__eval_interval": 100,
    "trainer__micro_train_batch_size_per_gpu": 2,
}


class Run:
    """The command in a process of its own, on a cluster of its own."""

    def __init__(self, nano: Path, out: Path, **changes: Any) -> None:
        out.mkdir(parents=True)
        self.out = out
        values = overrides(nano, out, **{**ON_RAY, **changes})
        words = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "skyrl.cli", "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=out,
            start_new_session=True,  # a terminal's group of processes
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        )

    @property
    def folder(self) -> Path:
        """The private folder of the run's cluster."""
        (folder,) = private_root(tempfile.gettempdir()).glob(f"skyrl-ray-{self.process.pid}-*")
        return folder

    def pid_of(self, name: str) -> int:
        """Of `engine-0`, `policy-1`, ..., by the log that it writes; of the driver."""
        if name == "driver":
            return self.process.pid
        log = str(self.out / "run" / "logs" / f"{name}.log")
        (pid,) = [pid for pid in tagged(RUN, self.folder.name) if _stdout_of(pid) == log]
        return pid

    def wait_for_step(self, step: int) -> None:
        file = self.out / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 180
        while not (file.exists() and file.read_text(encoding="utf-8").count("\n") > step):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the run made no progress"
            time.sleep(0.05)

    def wait_for(self, name: str, value: float) -> None:
        """Returns once a step has this metric."""
        deadline = time.monotonic() + PATIENCE
        file = self.out / "run" / "metrics.jsonl"
        while not any(json.loads(line).get(name) == value for line in file.read_text().splitlines()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{name} was never {value}"
            time.sleep(0.05)

    def ends(self, within: float = PATIENCE) -> tuple[int, str]:
        """Exit status, and what it said."""
        _, errors = self.process.communicate(timeout=within)
        return self.process.returncode, errors


@contextmanager
def running(nano: Path, out: Path, **changes: Any) -> Iterator[Run]:
    run = Run(nano, out, **changes)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def assert_nothing_is_left(folder: Path) -> None:
    """No process, no socket, no shared memory that nobody holds any more; what ends later ends within seconds."""
    deadline = time.monotonic() + 30
    while (tagged(RUN, folder.name) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert tagged(RUN, folder.name) == []
    assert not folder.exists()  # Ray's sockets, logs and session lie in it
    assert not [path for path in Path("/dev/shm").iterdir() if folder.name in path.name]


def _stdout_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


def moments(count: int, seed: int) -> list[tuple[int, float]]:
    """Random steps, and seconds into them."""
    draw = random.Random(seed)
    return [(draw.randint(0, 4), draw.uniform(0, 1.5)) for _ in range(count)]


def assert_killed(run: Run, victim: str) -> None:
    """Kills the process, and expects the end of the run, its name, and nothing left."""
    folder = run.folder
    os.kill(run.pid_of(victim), signal.SIGKILL)
    status, errors = run.ends()
    assert status == 1
    assert re.search(rf"{victim} \(process \d+ on .*died: it was killed", errors), errors
    assert "Traceback" not in errors
    assert_nothing_is_left(folder)


def kill_ray(run: Run, service: str) -> int:
    """Kills `gcs_server` or `raylet` of the run's cluster. Returns its process id."""
    (pid,) = [pid for pid in tagged(RUN, run.folder.name) if Path(f"/proc/{pid}/exe").resolve().name == service]
    os.kill(pid, signal.SIGKILL)
    return pid


def steps_of(run: Run) -> int:
    """Steps that the metrics of a run have, without the evaluation before them."""
    return (run.out / "run" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") - 1


@pytest.mark.long
@pytest.mark.parametrize("service", ["gcs_server", "raylet"])
def test_the_death_of_ray_itself_is_named_and_the_step_saved(nano: Path, tmp_path: Path, service: str) -> None:
    with running(nano, tmp_path / "out", generator__inference_engine__max_engine_restarts=3) as run:
        run.wait_for_step(1)
        folder, pid = run.folder, kill_ray(run, service)
        status, errors = run.ends()
    assert status == 1, errors
    assert f"Stopped because Ray's own process {service} (process {pid}) was killed (SIGKILL). Step " in errors
    assert "Traceback" not in errors and "could not be restarted" not in errors
    [step] = re.findall(r"Step (\d+) is saved: the same command continues after it\.$", errors, re.MULTILINE)
    assert int(step) == steps_of(run)
    assert (run.out / "checkpoints" / f"global_step_{step}").is_dir()
    assert_nothing_is_left(folder)


def stop_driver_beyond_the_deadline(run: Run) -> None:
    """SIGSTOP for longer than a process may be silent, then SIGCONT, and two more steps."""
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * HEARTBEAT)
    run.process.send_signal(signal.SIGCONT)
    steps_done = (run.out / "run" / "metrics.jsonl").read_text(encoding="utf-8").count("\n")
    run.wait_for_step(steps_done + 2)


@pytest.mark.long
def test_a_stopped_driver_resumes_and_a_process_that_is_killed_then_ends_the_run(nano: Path, tmp_path: Path) -> None:
    with running(nano, tmp_path / "out") as run:
        stop_driver_beyond_the_deadline(run)
        assert_killed(run, "engine-0")


@pytest.mark.long
@pytest.mark.parametrize("victim", ["engine-0", "policy-1"])
def test_a_stopped_process_ends_the_run_within_the_deadline_and_is_named(
    nano: Path, tmp_path: Path, victim: str
) -> None:
    with running(nano, tmp_path / "out") as run:
        run.wait_for_step(1)
        folder = run.folder
        os.kill(run.pid_of(victim), signal.SIGSTOP)
        status, errors = run.ends()
    assert status == 1
    silence = re.search(rf"{victim} \(process \d+ on .*has given no sign of life for (\d+) s", errors)
    assert silence is not None, errors
    assert int(silence[1]) >= HEARTBEAT
    assert_nothing_is_left(folder)


@pytest.mark.long
def test_an_engine_that_is_killed_is_started_again_and_serves(nano: Path, tmp_path: Path) -> None:
    """Twice; the third time it stays out, and the run continues with the other."""
    engines = {
        "generator__inference_engine__num_engines": 2,
        "generator__inference_engine__max_engine_restarts": 2,
        "generator__inference_engine__engine_restart_backoff_seconds": 0.0,
    }
    with running(nano, tmp_path / "out", **engines) as run:
        run.wait_for_step(1)
        for restarts in (1, 2):
            os.kill(run.pid_of("engine-0"), signal.SIGKILL)
            run.wait_for("inference/engine_restarts", restarts)
            steps_done = (run.out / "run" / "metrics.jsonl").read_text(encoding="utf-8").count("\n")
            run.wait_for_step(steps_done + 1)
        folder = run.folder
        os.kill(run.pid_of("engine-0"), signal.SIGKILL)
        run.wait_for("inference/engines_lost", 1)
        os.killpg(run.process.pid, signal.SIGINT)
        status, errors = run.ends()
    assert status == 130, errors
    assert_nothing_is_left(folder)
    records = [json.loads(line) for line in (run.out / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {record["inference/engine_restarts"] for record in records} <= {0, 1, 2}
    samples = [record["rollout/failures"] for record in records if "rollout/failures" in record]
    assert sum(samples) == 0


@pytest.mark.long
@pytest.mark.parametrize(("step", "pause"), moments(10, seed=8))
@pytest.mark.parametrize("victim", ["engine-0", "policy-1"])
def test_a_killed_process_ends_the_run_and_is_named(
    nano: Path, tmp_path: Path, victim: str, step: int, pause: float
) -> None:
    with running(nano, tmp_path / "out") as run:
        run.wait_for_step(step)
        time.sleep(pause)
        assert_killed(run, victim)


@pytest.mark.long
@pytest.mark.parametrize(("step", "pause"), moments(10, seed=3))
def test_a_killed_driver_leaves_nothing(nano: Path, tmp_path: Path, step: int, pause: float) -> None:
    with running(nano, tmp_path / "out") as run:
        run.wait_for_step(step)
        time.sleep(pause)
        folder = run.folder
        run.process.kill()
        run.process.communicate()
    assert_nothing_is_left(folder)


@pytest.mark.long
def test_a_stopped_driver_saves_its_step_on_ctrl_c(nano: Path, tmp_path: Path) -> None:
    with running(nano, tmp_path / "out") as run:
        stop_driver_beyond_the_deadline(run)
        folder = run.folder
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does it: to the actors, too
        status, errors = run.ends()
    assert status == 130, errors
    [step] = re.findall(r"^Stopped\. Step (\d+) is saved: the same command continues after it\.$", errors, re.MULTILINE)
    assert int(step) > 0
    assert_nothing_is_left(folder)
