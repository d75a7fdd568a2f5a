"""`skyrl launch`: what it checks, keeps and starts, and what it says about it."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from skyrl.cli.main import cli
from skyrl.config import compose
from skyrl.config.cluster import ClusterConfig
from skyrl.config.loading.stored import stored_form
from skyrl.errors import ConfigError, ProcessError, UserError
from skyrl.launchers.job import Launch, Machines, new_folder
from skyrl.launchers.local import LocalLauncher
from skyrl.launchers.prepared import Prepared, machines_of
from skyrl.launchers.ray import RayLauncher
from skyrl.launchers.slurm import SlurmLauncher
from tests.launchers.jobs import cluster, job, options
from tests.nano_run import as_words, overrides


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*words: str) -> Result:
    """`skyrl launch` with these words."""
    return CliRunner().invoke(cli, ["launch", *words])


def prepared(nano: Path, target: Any = "slurm", site: ClusterConfig | None = None, **changes: Any) -> Prepared:
    words = as_words(overrides(nano, Path("out"), **changes))
    return Prepared(target, [], words, site or cluster(), environ={"SEED": "7"})


def test_a_dry_run_prints_the_script_and_starts_nothing(nano: Path, workdir: Path) -> None:
    result = launch("slurm", "--dry-run", "--set", "slurm.partition=gpu", *as_words(overrides(nano, workdir)))
    assert result.exit_code == 0, result.output
    assert "--partition=gpu" in options(result.stdout)
    assert list(workdir.iterdir()) == []


def test_the_description_of_the_cluster_is_found_in_the_folder(nano: Path, workdir: Path) -> None:
    (workdir / "cluster.toml").write_text('[slurm]\naccount = "lab"\n')
    result = launch("slurm", "--dry-run", *as_words(overrides(nano, workdir)))
    assert "--account=lab" in options(result.stdout)


def test_what_cannot_run_is_not_submitted(nano: Path, workdir: Path) -> None:
    result = launch("slurm", *as_words(overrides(nano, workdir)), "trainer.epochs=two")
    assert "'two' is not a whole number" in str(result.exception)
    assert not (workdir / "launches").exists()


def test_the_kept_file_gives_the_run_and_derives_nothing(nano: Path, workdir: Path) -> None:
    (workdir / "seed.toml").write_text('trainer.seed = "env:SEED"\n')
    words = as_words(overrides(nano, workdir))
    kept = tomllib.loads(Prepared("local", ["seed.toml"], words, cluster(), environ={"SEED": "7"}).text)
    assert kept["trainer"]["seed"] == "env:SEED"
    assert kept["trainer"]["train_batch_size"] == 4
    assert "log_path" not in kept["trainer"]


def test_a_device_that_is_found_out_is_that_of_the_cluster(nano: Path, workdir: Path) -> None:
    ready = prepared(nano, trainer__device="auto")
    assert tomllib.loads(ready.text)["trainer"]["device"] == "cuda"
    assert any("taken as cuda" in line for line in ready.remarks)


@pytest.mark.parametrize(
    ("changes", "per_node", "expected"),
    [
        ({}, None, (1, 1)),
        ({"trainer__placement__policy_num_nodes": 2}, 2, (2, 2)),
        ({"trainer__placement__policy_num_nodes": 2}, None, (2, 8)),
        ({"trainer__placement__policy_num_gpus_per_node": 2}, 4, (1, 4)),
    ],
)
def test_a_run_takes_as_few_nodes_as_hold_it(
    changes: Mapping[str, Any], per_node: int | None, expected: tuple[int, int], nano: Path, workdir: Path
) -> None:
    on_ray: dict[str, Any] = {
        "trainer__placement__executor": "ray",
        "trainer__placement__colocate_all": False,
        "trainer__micro_train_batch_size_per_gpu": 2,
        "trainer__micro_forward_batch_size_per_gpu": 2,
    }
    run = prepared(nano, **(on_ray if changes else {}), **changes).run
    needed = machines_of(run, cluster(*([f"slurm.gpus_per_node={per_node}"] if per_node else [])))
    assert (needed.nodes, needed.per_node) == expected


def test_fewer_nodes_than_the_run_needs_are_refused(nano: Path, workdir: Path) -> None:
    with pytest.raises(UserError, match=r"slurm.nodes = 1, and this run needs 2"):
        prepared(
            nano,
            site=cluster("slurm.nodes=1", "slurm.gpus_per_node=1"),
            trainer__placement__executor="ray",
            trainer__placement__colocate_all=False,
        )


def test_a_signal_too_late_to_save_after_is_refused(nano: Path, workdir: Path) -> None:
    with pytest.raises(UserError, match="too short"):
        prepared(nano, site=cluster("slurm.signal_before=60"))


def test_a_run_that_does_not_resume_never_goes_back_to_the_queue(nano: Path, workdir: Path) -> None:
    ready = prepared(nano, trainer__resume_mode="none")
    assert "--no-requeue" in options(ready.shown("mine", (), "python"))
    assert any("does not resume" in line for line in ready.remarks)


def test_folders_of_launches_are_numbered(workdir: Path) -> None:
    assert [new_folder(workdir, "a run/of mine").name for _ in range(3)] == [
        "a-run-of-mine",
        "a-run-of-mine-2",
        "a-run-of-mine-3",
    ]


def test_a_launch_that_is_refused_leaves_no_folder(nano: Path, workdir: Path) -> None:
    result = launch("local", "--after", "another", *as_words(overrides(nano, workdir)))
    assert isinstance(result.exception, UserError)
    assert "--after needs the target slurm" in str(result.exception)
    assert not (workdir / "launches").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["local", "ray", "slurm"])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("trainer.seed", 7, "trainer.seed .* 42 there, 7 here"),
        ("generator.sampling_params.temperature", 0.5, "temperature .* there, 0.5 here"),
        ("trainer.run_name", "another", None),
    ],
)
def test_a_folder_of_another_run_is_refused_before_anything_is_submitted(
    target: str, field: str, value: object, message: str | None, nano: Path, workdir: Path
) -> None:
    values = overrides(nano, workdir)
    (workdir / "run").mkdir()
    stored = stored_form(compose([], values).config)
    (workdir / "run" / "config.json").write_text(json.dumps(stored))
    result = launch(target, "--dry-run", *as_words(values | {field: value}))
    if message is None:
        assert result.exit_code == 0, result.output
        return
    assert isinstance(result.exception, ConfigError)
    assert re.search(message, str(result.exception))
    assert "run belongs to a run with another configuration" in str(result.exception)


REFUSING = """#!/bin/bash
echo 'sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2
echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2
exit 1
"""


def test_a_launch_that_slurm_refuses_leaves_no_folder_and_says_why(
    nano: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "sbatch").write_text(REFUSING)
    (workdir / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{workdir}:{os.environ['PATH']}")
    result = launch("slurm", *as_words(overrides(nano, workdir)))
    assert isinstance(result.exception, ProcessError)
    assert str(result.exception) == (
        "sbatch: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host; fetch_config: DNS SRV lookup failed"
    )
    assert not (workdir / "launches").exists()


def test_a_launch_without_an_answer_of_ray_leaves_no_folder(
    nano: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise ProcessError("Ray's dashboard is out of reach")

    monkeypatch.setattr(RayLauncher, "_connected", unreachable)
    result = launch("ray", *as_words(overrides(nano, workdir)))
    assert str(result.exception) == "Ray's dashboard is out of reach"
    assert not (workdir / "launches").exists()


def test_a_path_that_is_not_a_launch_is_refused(workdir: Path) -> None:
    (workdir / "file").write_text("")
    for name in ("nothing", "file"):
        result = launch("status", name)
        assert isinstance(result.exception, UserError)
        assert str(result.exception) == f"{name} is not the folder of a launch: it has no launch.json"


def test_a_local_launch_runs_in_the_background_to_its_end(workdir: Path) -> None:
    python = workdir / "python"
    python.write_text('#!/bin/bash\necho "trained with $LEVEL"\n')
    python.chmod(0o755)
    launcher = LocalLauncher(cluster("variables.LEVEL=a b"), str(python))
    started = launcher.start(job(workdir / "launch"))
    os.waitpid(int(started.id.partition(":")[0]), 0)
    assert (workdir / "launch" / "logs" / "local.log").read_text() == "trained with a b\n"
    assert launcher.state(Launch.read(workdir / "launch")) == "failed (its process is gone)"  # it reported nothing
    assert "has ended already" in launcher.stop(started, now=False)


class Slurm:
    """Answers commands of Slurm as they were written down at a real one."""

    def __init__(self, **answers: str | ProcessError) -> None:
        self.answers, self.asked = answers, list[tuple[str, ...]]()

    def __call__(self, words: Any) -> str:
        self.asked.append(tuple(words))
        answer = self.answers.get(words[0], "")
        if isinstance(answer, ProcessError):
            raise answer
        return answer


GONE = ProcessError("squeue: slurm_load_jobs error: Invalid job id specified")


@pytest.mark.parametrize(
    ("slurm", "state"),
    [
        (Slurm(squeue="RUNNING|None\n"), "running"),
        (Slurm(squeue="PENDING|Priority\n"), "waiting (Priority)"),
        (Slurm(squeue="RUNNING|None\nPENDING|JobArrayTaskLimit\n"), "running, waiting (JobArrayTaskLimit)"),
        (Slurm(squeue=GONE, scontrol="JobId=3 JobState=TIMEOUT Reason=TimeLimit"), "failed (time limit)"),
        (Slurm(squeue=GONE, scontrol=GONE), "stopped"),
    ],
)
def test_states_are_those_of_slurm_or_the_last_that_was_reported(slurm: Slurm, state: str, workdir: Path) -> None:
    task = job(workdir / "launch")
    (task.folder / "state.json").write_text(json.dumps({"state": "stopped"}))
    of = Launch(target="slurm", name="mine", folder=task.folder, id="3", cwd=str(workdir))
    assert SlurmLauncher(cluster(), sys.executable, slurm).state(of) == state


@pytest.mark.parametrize(
    ("queue", "now", "command"),
    [
        ("RUNNING|None", False, ("scancel", "--batch", "--signal=USR1", "3")),
        ("RUNNING|None", True, ("scancel", "3")),
        ("PENDING|Priority", False, ("scancel", "3")),
    ],
)
def test_a_job_that_runs_is_asked_to_save_and_one_that_waits_is_cancelled(
    queue: str, now: bool, command: tuple[str, ...], workdir: Path
) -> None:
    slurm, task = Slurm(squeue=queue), job(workdir / "launch")
    of = Launch(target="slurm", name="mine", folder=task.folder, id="3", cwd=str(workdir))
    SlurmLauncher(cluster(), sys.executable, slurm).stop(of, now=now)
    assert slurm.asked[-1] == command


def test_a_job_may_wait_for_a_launch_by_its_folder(workdir: Path) -> None:
    first = SlurmLauncher(cluster(), sys.executable, Slurm(sbatch="41\n")).start(job(workdir / "first"))
    second = job(workdir / "second", after=(str(first.folder),))
    SlurmLauncher(cluster(), sys.executable, Slurm(sbatch="42\n")).start(second)
    assert "--dependency=afterok:41" in options((workdir / "second" / "job.sbatch").read_text())


def test_the_token_of_ray_is_for_its_user_alone(workdir: Path) -> None:
    launcher = SlurmLauncher(cluster(), sys.executable, Slurm(sbatch="41\n"))
    launcher.start(job(workdir / "launch", machines=Machines(on_ray=True)))
    assert (workdir / "launch" / "ray-token").stat().st_mode & 0o777 == 0o600
    assert len((workdir / "launch" / "ray-token").read_text()) == 64


def test_a_run_without_ray_has_no_token(workdir: Path) -> None:
    SlurmLauncher(cluster(), sys.executable, Slurm(sbatch="41\n")).start(job(workdir / "launch"))
    assert not (workdir / "launch" / "ray-token").exists()


def test_without_slurm_the_command_says_where_it_would_be(
    nano: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    result = launch("slurm", *as_words(overrides(nano, workdir)))
    assert isinstance(result.exception, UserError)
    assert "login node" in str(result.exception)
