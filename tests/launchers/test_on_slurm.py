"""Runs as jobs of a real Slurm with four nodes on this machine: to the end, through requeues and the loss of a node."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.slurm_cluster import slurm_cluster
from tests.nano_run import as_words, overrides

pytestmark = [
    pytest.mark.long,
    pytest.mark.needs("slurmctld", "slurmd", "munged"),
    pytest.mark.xdist_group("slurm"),
]

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
WAITS = 240.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as conf:
        os.environ["SLURM_CONF"] = str(conf)
        yield {**os.environ, "SLURM_CONF": str(conf), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        del os.environ["SLURM_CONF"]


class Site:
    """A folder to launch from."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def run(self, *words: str) -> str:
        """Output of a command that has to succeed."""
        result = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def launch(self, *words: str) -> str:
        return self.run(sys.executable, "-m", "skyrl.cli", "launch", *words)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's metrics."""
        file = self.folder / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> list[int]:
        """Steps in the run's metrics."""
        return [line["step"] for line in self.metrics()]

    def trains(self, steps: int) -> None:
        """Waits for that many more steps."""
        target = len(self.steps()) + steps
        self.wait(lambda: len(self.steps()) >= target, 1200)

    def wait(self, holds: Callable[[], bool], seconds: float = WAITS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.run("scontrol", "show", "job") + self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(file.read_text() for file in self.folder.glob("launches/*/logs/*.log"))

    def ended(self) -> bool:
        return any(word in self.launch("status") for word in ("finished", "failed", "stopped"))

    def starts_again(self, job: str, restarts: int) -> None:
        """Slurm lets a job that was put back wait until its old credential is over: seconds here, often two minutes."""

        def shown(text: str) -> bool:
            return text in self.run("scontrol", "show", "job", job)

        self.wait(lambda: shown(f"Restarts={restarts}"))
        self.wait(lambda: shown("JobState=RUNNING"))


@pytest.fixture
def site(tmp_path: Path, environment: dict[str, str]) -> Site:
    return Site(tmp_path, environment)


def words(nano: Path, folder: Path, **changes: Any) -> list[str]:
    return as_words(overrides(nano, folder, trainer__run_name="mine", trainer__eval_interval=-1, **changes))


def test_a_run_survives_its_signal_a_requeue_and_a_node_that_is_lost(site: Site, nano: Path) -> None:
    size = {"trainer__epochs": 400, "trainer__max_training_steps": 600, "trainer__ckpt_interval": 20}
    site.launch("slurm", "--set", "slurm.cpus_per_gpu=2", *words(nano, site.folder, **size))
    job = site.run("squeue", "-h", "-o", "%i").strip()
    site.wait(lambda: len(site.steps()) > 12)
    site.run("scancel", "--batch", "--signal=USR1", job)  # as before the time limit
    site.wait(lambda: "back to the queue" in site.logs())
    site.starts_again(job, 1)
    site.wait(lambda: len(site.steps()) > 60)
    site.run("scontrol", "requeue", job)
    site.starts_again(job, 2)
    site.wait(lambda: len(site.steps()) > 100)
    node = site.run("squeue", "-h", "-o", "%N").strip()
    site.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    site.starts_again(job, 3)
    before = len(site.steps())
    site.wait(lambda: len(site.steps()) > before + 30)
    site.launch("stop", "mine")
    site.wait(site.ended)
    steps = site.steps()
    assert steps == list(range(len(steps)))  # no step is missing, none was trained twice
    assert site.run("squeue", "-h").strip() == ""


def test_a_run_on_two_nodes_has_a_ray_cluster_of_its_own(site: Site, nano: Path) -> None:
    on_ray: dict[str, Any] = {
        "trainer__placement__executor": "ray",
        "trainer__placement__colocate_all": False,
        "trainer__placement__policy_num_nodes": 2,
        "generator__inference_engine__num_engines": 2,
        "trainer__micro_train_batch_size_per_gpu": 2,
        "trainer__micro_forward_batch_size_per_gpu": 2,
    }
    settings = ("--set", "slurm.cpus_per_gpu=2", "--set", "slurm.gpus_per_node=2")
    site.launch("slurm", *settings, *words(nano, site.folder, **on_ray))
    site.wait(site.ended)
    assert "finished" in site.launch("status"), site.logs()
    assert site.steps() == [0, 1, 2, 3, 4, 5, 6] or site.steps() == [1, 2, 3, 4, 5, 6]
    token = (site.folder / "launches" / "mine" / "ray-token").read_text()
    assert token not in site.logs()


def test_the_quick_start_learns_on_two_nodes_while_it_is_requeued_and_loses_a_node(site: Site) -> None:
    base = site.folder / "base"
    subprocess.run([sys.executable, str(QUICKSTART / "prepare.py"), "--out", str(base)], check=True, cwd=ROOT)
    values: dict[str, Any] = {
        "data.train_data": [str(base / "train.parquet")],
        "data.val_data": [str(base / "validation.parquet")],
        "environment.env_class": f"{QUICKSTART / 'reward.py'}:sorted_exactly",
        "trainer.policy.model.path": str(base / "model"),
        "trainer.run_path": str(site.folder / "run"),
        "trainer.run_name": "mine",
        "trainer.ckpt_interval": 5,
        "trainer.placement.executor": "ray",
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_nodes": 2,
        "generator.inference_engine.num_engines": 2,
    }
    settings = ("--set", "slurm.cpus_per_gpu=2", "--set", "slurm.gpus_per_node=2")
    site.launch("slurm", *settings, str(QUICKSTART / "grpo.toml"), *as_words(values))
    job = site.run("squeue", "-h", "-o", "%i").strip()
    moments = random.Random(0)
    site.trains(moments.randint(8, 25))
    site.run("scontrol", "requeue", job)
    site.starts_again(job, 1)
    site.trains(moments.randint(8, 25))
    lost = site.run("squeue", "-h", "-o", "%B").strip()
    site.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    site.starts_again(job, 2)
    site.run("scontrol", "update", f"NodeName={lost}", "State=RESUME")  # other tests count on it
    site.wait(site.ended, 2400)
    assert "finished" in site.launch("status"), site.logs()
    steps = site.steps()
    assert steps == list(range(steps[0], steps[-1] + 1))  # no step is missing, none was trained twice
    scores = [line["eval/all/avg_score"] for line in site.metrics() if "eval/all/avg_score" in line]
    assert scores[-1] >= 0.8


def test_a_launch_that_depends_on_a_failed_one_never_starts(site: Site, nano: Path) -> None:
    broken = words(nano, site.folder, environment__env_class="missing.py:reward")
    (site.folder / "missing.py").write_text("def reward(completion, ground_truth, **others):\n    return 1.0\n")
    site.launch("slurm", "--name", "first", "--set", "slurm.cpus_per_gpu=2", *broken)
    (site.folder / "missing.py").unlink()  # between the check and the start
    site.launch("slurm", "--name", "second", "--after", "launches/first", *words(nano, site.folder / "second"))
    site.wait(lambda: site.run("squeue", "-h").strip() == "")
    assert not (site.folder / "second").exists()


def test_a_sweep_of_six_is_an_array_of_three_at_a_time_and_is_not_submitted_twice(site: Site, nano: Path) -> None:
    values = overrides(nano, site.folder, trainer__max_training_steps=1, trainer__eval_before_train=False)
    (site.folder / "run.toml").write_text("\n".join(f"{path} = {json.dumps(value)}" for path, value in values.items()))
    sweep = 'name = "s"\nrun = ["run.toml"]\nseeds = [1, 2, 3, 4, 5, 6]\nat_once = 3\n'
    (site.folder / "sweep.toml").write_text(sweep)
    command = (
        sys.executable,
        "-m",
        "skyrl.cli",
        "sweep",
        "sweep.toml",
        "--on",
        "slurm",
        "--set",
        "slurm.cpus_per_gpu=2",
    )
    assert "6 runs were submitted as job" in site.run(*command)
    result = subprocess.run(command, cwd=site.folder, env=site.environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "of this sweep is" in result.stderr
    at_once: list[int] = []

    def is_over() -> bool:
        states = site.run("squeue", "-h", "-r", "-o", "%T").split()
        at_once.append(states.count("RUNNING"))
        return not states

    site.wait(is_over)
    assert max(at_once) == 3  # four nodes would have run four
    states = [json.loads(file.read_text())["state"] for file in site.folder.glob("sweeps/s/tasks/*/state.json")]
    assert states == ["finished"] * 6
    assert "submitted" not in site.run(*command)  # all of it is trained
    results = json.loads((site.folder / "sweeps" / "s" / "results.json").read_text())
    assert [point["states"] for point in results] == [["finished"] * 6]
