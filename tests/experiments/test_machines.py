"""Runs on two machines, whose network and power fail: each ends or goes on as configured, and says which machine."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from skyrl.checkpoint.store import CheckpointStore
from skyrl.errors import RunError
from skyrl.tracking.jsonlines import JsonLines
from tests.experiments.logged_sampler import draws_in
from tests.experiments.test_kills_of_samplers import followed
from tests.experiments.test_lost_ranks import samples
from tests.machines import RAY_PORTS, ROOT, Machines
from tests.nano_run import as_words, overrides, train
from tests.processes.clusters import soon
from tests.supervised_run import toml_file

pytestmark = [pytest.mark.machines, pytest.mark.xdist_group("machines")]

PATIENCE = 420.0
HEARTBEAT = 6.0

SHORT: dict[str, Any] = {
    "trainer__deterministic": True,
    "trainer__micro_train_batch_size_per_gpu": 1,
    "trainer__micro_forward_batch_size_per_gpu": 1,
    "trainer__max_training_steps": 10,
    "trainer__epochs": 2,
    "trainer__ckpt_interval": 2,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}
BOTH: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__heartbeat_timeout_seconds": HEARTBEAT,
    "trainer__placement__start_timeout_seconds": 120,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "engine elsewhere": {"trainer__placement__policy_num_gpus_per_node": 2},
    "ranks on both": {"trainer__placement__policy_num_nodes": 2},
}
BETA = r"\(process \d+ on beta \(10\.77\.0\.2\), node \w+\)"
CUT_OFF = (
    r"(has given no sign of life for \d+ s.*: its machine 10\.77\.0\.2 cannot be reached"
    r"|died: (its machine 10\.77\.0\.2 no longer answers Ray|the connection to it was lost))"
)


@pytest.fixture(scope="module")
def both() -> Iterator[Machines]:
    with Machines("alpha", "beta") as machines:
        machines.join_ray(machines["alpha"], slots=2)
        yield machines


@pytest.fixture
def machines(both: Machines) -> Machines:
    """alpha, which has places for two processes, and beta, which has one; nothing runs on them but Ray."""
    both.network()
    both["beta"].kill()
    both.join_ray(both["beta"])
    return both


class Started:
    """A run whose command runs on alpha."""

    def __init__(self, machines: Machines, nano: Path, out: Path, layout: str, **changes: Any) -> None:
        out.mkdir(exist_ok=True)
        self.machines, self.out = machines, out
        values = overrides(nano, out, **{**SHORT, **BOTH, **LAYOUTS[layout], **changes})
        self._file = toml_file(out / "run.toml", values | {"trainer.placement.ray_address": machines.head})
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "skyrl.cli", "run", self._file]
        return self.machines["alpha"].start(command, self.out / "said.txt", TMPDIR=str(self.out))

    @property
    def said(self) -> str:
        return (self.out / "said.txt").read_text()

    @property
    def steps(self) -> int:
        file = self.out / "run" / "metrics.jsonl"
        return max((line["step"] for line in JsonLines(file).read()), default=0) if file.exists() else 0

    def reaches(self, step: int) -> None:
        """Returns once it has trained so many steps."""
        assert soon(lambda: self.steps >= step or self._process.poll() is not None, PATIENCE), self.said
        assert self._process.poll() is None, self.said

    def ends(self) -> int:
        """Its exit code."""
        return self._process.wait(PATIENCE)

    def is_killed_and_starts_again(self) -> None:
        """The command is killed, which ends all that it started, and begins anew."""
        assert self._process.poll() is None, self.said
        self._process.kill()
        self._process.wait()
        assert self.left_nothing(), self.said
        self._process = self._start()

    def goes_on(self) -> None:
        """The same command again, to the end."""
        self._process = self._start()
        assert self.ends() == 0, self.said

    def left_nothing(self) -> bool:
        """Whether all of its processes end, on both machines."""
        return soon(lambda: not [mark for name in ("alpha", "beta") for mark in self.machines[name].actors], 120)

    def trained_as_undisturbed(self, nano: Path, **changes: Any) -> None:
        """The same samples as a run in one process; of many more steps, a sample may differ by rounding."""
        train(nano, self.out / "undisturbed", **{**SHORT, **changes})
        assert samples(self.out) == samples(self.out / "undisturbed")


def began(machines: Machines, nano: Path, out: Path, layout: str, **changes: Any) -> Started:
    """A run that has trained two steps."""
    run = Started(machines, nano, out, layout, **changes)
    run.reaches(2)
    return run


POOR: dict[str, dict[str, float]] = {
    "loss": {"loss": 0.05},
    "delay": {"delay": 0.02},
    "loss and delay": {"loss": 0.02, "delay": 0.01},
}
ENDLESS = {"trainer__max_training_steps": 400, "trainer__epochs": 80}
NO_RESTARTS = {"generator__inference_engine__max_engine_restarts": 0}
LOST = [("engine elsewhere", "engine-0"), ("ranks on both", "policy-1")]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "lost"), LOST)
def test_a_machine_that_is_cut_off_is_named(
    machines: Machines, nano: Path, tmp_path: Path, layout: str, lost: str
) -> None:
    run = began(machines, nano, tmp_path, layout, **ENDLESS, **NO_RESTARTS)
    assert soon(lambda: bool(CheckpointStore(tmp_path / "checkpoints").steps()), PATIENCE), run.said
    since = time.monotonic()
    machines.network(cut=["beta"])
    assert run.ends() == RunError.exit_code
    print(f"{layout}: {time.monotonic() - since:.1f} s to the message")
    assert re.search(f"{lost} {BETA} {CUT_OFF}", run.said.splitlines()[-1]), run.said
    machines.network()
    assert run.left_nothing(), run.said
    assert CheckpointStore(tmp_path / "checkpoints").steps()


@pytest.mark.long
@pytest.mark.parametrize(("layout", "lost"), LOST)
def test_a_machine_that_vanishes_is_named_and_the_run_resumes_when_it_is_back(
    machines: Machines, nano: Path, tmp_path: Path, layout: str, lost: str
) -> None:
    run = began(machines, nano, tmp_path, layout, **NO_RESTARTS)
    assert soon(lambda: bool(CheckpointStore(tmp_path / "checkpoints").steps()), PATIENCE), run.said
    since = time.monotonic()
    machines.network(cut=["beta"])
    machines["beta"].kill()
    assert run.ends() == RunError.exit_code
    print(f"{layout}: {time.monotonic() - since:.1f} s to the message")
    assert re.search(f"{lost} {BETA} {CUT_OFF}", run.said.splitlines()[-1]), run.said
    assert run.left_nothing(), run.said
    machines.network()
    machines.join_ray(machines["beta"])
    run.goes_on()
    assert "Continuing after step" in run.said
    if layout == "engine elsewhere":
        run.trained_as_undisturbed(nano)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_draws_by_rewards_what_an_undisturbed_one_draws(
    machines: Machines, nano: Path, tmp_path: Path, layout: str
) -> None:
    rewarded = {"environment__env_class": "tests.experiments.logged_sampler:by_letter"}
    run = Started(machines, nano, tmp_path, layout, **rewarded, **followed(tmp_path))
    for step in range(10):  # 20 moments with both layouts
        run.reaches(step)
        run.is_killed_and_starts_again()
    assert run.ends() == 0, run.said
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    train(nano, undisturbed, **{**SHORT, **rewarded, **followed(undisturbed)})
    assert draws_in(tmp_path / "draws") == draws_in(undisturbed / "draws")


@pytest.mark.long
def test_the_only_engine_is_started_again_on_a_machine_that_came_back(
    machines: Machines, nano: Path, tmp_path: Path
) -> None:
    patient = {"generator__inference_engine__engine_restart_backoff_seconds": 20}
    run = began(machines, nano, tmp_path, "engine elsewhere", **patient)
    machines["beta"].kill()
    assert soon(lambda: "inference engine 0 is out of service, 0 left" in run.said, PATIENCE), run.said
    machines.join_ray(machines["beta"])
    assert run.ends() == 0, run.said
    assert "inference engine 0 has restarted" in run.said
    run.trained_as_undisturbed(nano)


AHEAD = """
import time
now, now_in_ns = time.time, time.time_ns  # the latter is what Ray stamps log records with
time.time = lambda: now() + 3600
time.time_ns = lambda: now_in_ns() + 3600 * 10**9
"""


@pytest.mark.long
def test_clocks_that_are_apart_change_no_sample_and_no_order_of_the_logs(
    machines: Machines, nano: Path, tmp_path: Path
) -> None:
    """The machine of the engine is an hour ahead; its log has the times of the command."""
    machines["beta"].kill()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(AHEAD)
    machines.join_ray(machines["beta"], variables={"PYTHONPATH": f"{tmp_path / 'other'}:{ROOT}"})
    since = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}"
    run = Started(machines, nano, tmp_path, "engine elsewhere")
    assert run.ends() == 0, run.said
    log = (tmp_path / "run" / "logs" / "engine-0.log").read_text()
    times = re.findall(r"^(\S+)Z engine-0 step \d+ INFO .*weights of version \d+;", log, re.MULTILINE)
    assert len(times) >= 10, log
    assert since <= min(times) and max(times) <= f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}~", log
    run.trained_as_undisturbed(nano)


@pytest.mark.long
def test_a_run_waits_for_a_machine_that_vanished(machines: Machines, nano: Path, tmp_path: Path) -> None:
    run = began(machines, nano, tmp_path, "ranks on both", trainer__faults__on_lost_rank="wait")
    machines["beta"].kill()
    assert soon(lambda: "It restarts in" in run.said, PATIENCE), run.said
    machines.join_ray(machines["beta"])
    assert run.ends() == 0, run.said
    assert re.search(f"policy-1 {BETA} ", run.said), run.said
    run.trained_as_undisturbed(nano)


@pytest.mark.long
def test_a_run_goes_on_without_a_machine_that_vanished(machines: Machines, nano: Path, tmp_path: Path) -> None:
    run = began(machines, nano, tmp_path, "ranks on both", trainer__faults__on_lost_rank="shrink")
    machines["beta"].kill()
    assert run.ends() == 0, run.said
    assert "trainer.placement.policy_num_nodes: 2 -> 1" in run.said
    run.trained_as_undisturbed(nano)


@pytest.mark.long
@pytest.mark.parametrize("rules", POOR.values(), ids=POOR)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_poor_network_changes_no_sample(
    machines: Machines, nano: Path, tmp_path: Path, layout: str, rules: dict[str, float]
) -> None:
    run = began(machines, nano, tmp_path, layout, trainer__placement__heartbeat_timeout_seconds=60)
    machines.network(**rules)
    assert run.ends() == 0, run.said
    run.trained_as_undisturbed(nano)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_network_that_is_cut_for_a_moment_changes_no_sample(
    machines: Machines, nano: Path, tmp_path: Path, layout: str
) -> None:
    run = began(machines, nano, tmp_path, layout, trainer__placement__heartbeat_timeout_seconds=60)
    machines.network(cut=["beta"])
    time.sleep(3)
    machines.network()
    assert run.ends() == 0, run.said
    run.trained_as_undisturbed(nano)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_port_that_is_closed_between_machines_is_named(
    machines: Machines, nano: Path, tmp_path: Path, layout: str
) -> None:
    """Ray's own ports are open, as where a firewall knows of them and of nothing else."""
    machines.network(closed=[[RAY_PORTS[1] + 1, 65535]])
    run = Started(machines, nano, tmp_path, layout, **NO_RESTARTS)
    assert run.ends() == RunError.exit_code
    assert re.search(r"on beta.* 10\.77\.0\.1:\d+", run.said.splitlines()[-1]), run.said
    assert run.left_nothing()


@pytest.mark.long
def test_the_quick_start_learns_on_two_machines(machines: Machines, tmp_path: Path) -> None:
    """Two ranks on one, the engine on the other; what they write lies on a disk of both."""
    base, run = tmp_path / "base", tmp_path / "run"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", "--out", str(base)], cwd=ROOT, check=True)
    values = {
        "data.train_data": [str(base / "train.parquet")],
        "data.val_data": [str(base / "validation.parquet")],
        "trainer.policy.model.path": str(base / "model"),
        "trainer.run_path": str(run),
        "trainer.ckpt_path": str(tmp_path / "checkpoints"),
        "trainer.export_path": str(tmp_path / "exports"),
        "trainer.eval_before_train": False,
        "trainer.placement.executor": "ray",
        "trainer.placement.ray_address": machines.head,
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": 2,
    }
    command = [sys.executable, "-m", "skyrl.cli", "run", "examples/quickstart/grpo.toml", *as_words(values)]
    output_file = tmp_path / "said.txt"
    assert machines["alpha"].start(command, output_file).wait(3000) == 0, output_file.read_text()
    [accuracy] = [line["eval/all/avg_score"] for line in JsonLines(run / "metrics.jsonl").read() if line["step"] == 100]
    print(f"accuracy {accuracy:.3f} after 100 steps")
    assert accuracy > 0.8
