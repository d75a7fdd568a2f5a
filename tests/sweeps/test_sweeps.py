"""Sweeps: which runs they are, that none is trained twice, and how they compare."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner, Result

from skyrl.cli.main import cli
from skyrl.config.cluster import ClusterConfig
from skyrl.errors import ConfigError, Stopped, UserError
from skyrl.launchers.job import GONE, Job, Launch, report_in, write_state
from skyrl.launchers.local import LocalLauncher
from skyrl.processes.orphans import lives, process_id
from skyrl.sweeps.results import results, table
from skyrl.sweeps.running import ACTIVE, _job, one_at_a_time, run_here
from skyrl.sweeps.sweep_file import SweepConfig, load_sweep, points_of
from skyrl.sweeps.trials import SweepTrial, Trials, trials_of, waiting
from tests.nano_run import overrides

LR = "trainer.policy.optimizer_config.lr"
SEED = "trainer.seed"


@pytest.fixture
def workdir(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `run.toml`, the nano run of one step."""
    monkeypatch.chdir(tmp_path)
    values = overrides(nano, tmp_path, trainer__max_training_steps=1, trainer__eval_before_train=False)
    (tmp_path / "run.toml").write_text("\n".join(f"{path} = {json.dumps(value)}" for path, value in values.items()))
    return tmp_path


def sweep(**tables: Any) -> SweepConfig:
    return SweepConfig.from_dict_config({"run": ("run.toml",), **tables})


def points(**tables: Any) -> list[dict[str, Any]]:
    return list(points_of(sweep(**tables), SEED))


def trials(**tables: Any) -> Trials:
    return trials_of(sweep(**tables), {})


def write(workdir: Path, **tables: Any) -> None:
    (workdir / "sweep.toml").write_text(tomli_w.dumps({"name": "s", "run": ["run.toml"], **tables}))


def command(*words: str) -> Result:
    """`skyrl sweep sweep.toml` with these words."""
    return CliRunner().invoke(cli, ["sweep", "sweep.toml", *words])


def test_a_grid_is_every_combination() -> None:
    assert points(grid={"a": (1, 2), "b": ("x", "y")}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_points_of_a_list_belong_together_and_each_is_run_with_every_seed() -> None:
    assert points(points=({"a": 1, "b": 2}, {"a": 3, "b": 4}), seeds=(7, 8)) == [
        {"a": 1, "b": 2, SEED: 7},
        {"a": 1, "b": 2, SEED: 8},
        {"a": 3, "b": 4, SEED: 7},
        {"a": 3, "b": 4, SEED: 8},
    ]


def test_paths_may_be_written_as_tables(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('run = ["run.toml"]\n[grid]\ntrainer.epochs = [1, 2]\n"trainer.seed" = [3]\n')
    read = load_sweep(str(tmp_path / "sweep.toml"))
    assert list(points_of(read, SEED)) == [{"trainer.epochs": 1, SEED: 3}, {"trainer.epochs": 2, SEED: 3}]


def drawn(draws: int, **values: Any) -> list[dict[str, Any]]:
    return points(random={"draws": draws, "values": values})


def test_draws_do_not_change_when_draws_or_paths_are_added() -> None:
    lr = {"log_uniform": (1e-6, 1e-4)}
    three = drawn(3, lr=lr)
    assert drawn(5, lr=lr)[:3] == three
    assert [point["lr"] for point in drawn(3, lr=lr, other={"uniform": (0, 1)})] == [point["lr"] for point in three]
    assert len({point["lr"] for point in three}) == 3


def test_draws_lie_within_their_bounds() -> None:
    points = drawn(
        50,
        a={"uniform": (2, 3)},
        b={"log_uniform": (1e-6, 1e-4)},
        c={"integer": (1, 3)},
        d={"choice": ("x", "y")},
    )
    assert all(2 <= point["a"] <= 3 and 1e-6 <= point["b"] <= 1e-4 for point in points)
    assert {point["c"] for point in points} == {1, 2, 3}
    assert {point["d"] for point in points} == {"x", "y"}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": ()}, "no configuration file is given"),
        ({"grid": {"trainer.seed": 1}}, "is not a list of values"),
        ({"grid": {"trainer.seed": ()}}, "is not a list of values"),
        ({"random": {"draws": 2}}, "2 draws of 0 values"),
        ({"random": {"draws": 1, "values": {"a": {"normal": (0, 1)}}}}, "is none of: uniform"),
        ({"random": {"draws": 1, "values": {"a": {"uniform": (3, 1)}}}}, r"needs \[low, high\]"),
        ({"random": {"draws": 1, "values": {"a": {"log_uniform": (0, 1)}}}}, "positive bounds"),
    ],
)
def test_an_invalid_sweep_is_refused(tables: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, **tables)
    with pytest.raises(ConfigError, match=message):
        load_sweep(str(tmp_path / "sweep.toml"))


def test_every_point_is_checked_before_anything_starts(workdir: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        trials(grid={LR: (1e-3, "fast"), "trainer.epoch": (1,)})
    locations = {problem.path: problem.location for problem in refused.value.problems}
    assert locations == {LR: "grid of the sweep", "trainer.epoch": "grid of the sweep"}
    with pytest.raises(ConfigError) as refused:
        trials(set={"trainer.epochs": "many"}, points=({LR: "fast"},), seeds=(-1,))
    locations = {problem.path: problem.location for problem in refused.value.problems}
    assert locations == {"trainer.epochs": "set of the sweep", LR: "points of the sweep", SEED: "seeds of the sweep"}
    assert not (workdir / "sweeps").exists()


def test_points_with_equal_configurations_are_one_trial(workdir: Path) -> None:
    sweep = trials(grid={LR: (1e-3, 0.001, 2e-3)})
    assert [trial.point[LR] for trial in sweep.trials] == [1e-3, 2e-3]
    assert sweep.twice == (f"{LR}=0.001 is the same training as {LR}=0.001",)


def test_a_trial_keeps_its_number_when_the_sweep_grows(workdir: Path) -> None:
    trials(grid={LR: (1e-3, 2e-3)}).write()
    extended = trials(grid={LR: (5e-4, 2e-3, 1e-3)})
    assert {trial.point[LR]: trial.number for trial in extended.trials} == {1e-3: 0, 2e-3: 1, 5e-4: 2}


def test_trials_have_folders_of_their_own(workdir: Path) -> None:
    sweep_trials = trials(grid={LR: (1e-3, 2e-3)}).trials
    folders = {trial.run.trainer.run_path for trial in sweep_trials}
    assert folders == {str(workdir / "sweeps" / "sweep" / "tasks" / str(number) / "run") for number in (0, 1)}
    assert (
        len(
            {trial.run.trainer.ckpt_path for trial in sweep_trials}
            | {trial.run.trainer.export_path for trial in sweep_trials}
        )
        == 4
    )


def test_a_finished_trial_is_not_trained_again_and_a_failed_one_if_asked(workdir: Path) -> None:
    sweep = trials(grid={LR: (1e-3, 2e-3, 3e-3)})
    sweep.write()
    for trial, state in zip(sweep.trials, ("finished", "failed", "stopped"), strict=True):
        write_state(trial.folder, state=state)
    assert [trial.number for trial in waiting(sweep, retry=False)] == [2]
    assert [trial.number for trial in waiting(sweep, retry=True)] == [1, 2]


class Launcher:
    """Starts nothing: a launch ends when it has been looked at twice."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.most, self.started, self.stopped = 0, list[str](), list[str]()

    def start(self, job: Job) -> Launch:
        self.started.append(job.folder.name)
        self.running[job.folder.name] = 2
        self.most = max(self.most, len(self.running))
        return Launch(target="local", name=job.name, folder=job.folder, id=job.folder.name, cwd="")

    def state(self, launch: Launch) -> str:
        self.running[launch.id] -= 1
        if self.running[launch.id] > 0:
            return "running"
        del self.running[launch.id]
        return "finished"

    def stop(self, launch: Launch, *, now: bool) -> str:
        self.stopped.append(launch.id)
        return ""


def test_no_more_runs_are_started_than_may_run_at_once(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.sweeps.running._LOOK_SECONDS", 0.0)
    launcher, sweep = Launcher(), trials(seeds=(1, 2, 3, 4, 5))
    sweep.write()
    run_here(launcher, sweep.trials, 2, lambda line: None)
    assert launcher.started == ["0", "1", "2", "3", "4"]
    assert launcher.most == 2


def test_an_interrupted_sweep_lets_its_runs_save(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.sweeps.running._LOOK_SECONDS", 0.0)
    launcher, sweep = Launcher(), trials(seeds=(1, 2, 3))
    sweep.write()

    def say(line: str) -> None:
        if line.startswith("trial 1 started"):
            raise Stopped("Stopped by SIGTERM; nothing was saved.", 75)

    with pytest.raises(Stopped, match="running trials with it: 2. The same command continues them") as stopped:
        run_here(launcher, sweep.trials, 2, say)
    assert stopped.value.exit_code == 75
    assert launcher.stopped == ["0", "1"]
    assert launcher.running == {}


STUB = """
import os, sys
from pathlib import Path
from skyrl.launchers.supervised import supervise
folder = Path(sys.argv[sys.argv.index("--folder") + 1])
wait = 'echo >> "$0/began"; trap "exit 75" TERM; until [ -e "$0/end" ]; do sleep 0.02; done; exit 0'
sys.exit(supervise(["bash", "-c", wait, str(folder)], folder, os.environ))
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], LocalLauncher]]:
    """Makes launchers on this machine as separate commands do. Each run ends when the file `end` is in its folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr("skyrl.sweeps.running._LOOK_SECONDS", 0.02)
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "python").write_text(f'#!/bin/bash\nexec {sys.executable} {tmp_path / "stub.py"} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    launchers = list[LocalLauncher]()

    def make() -> LocalLauncher:
        launchers.append(LocalLauncher(ClusterConfig(), str(tmp_path / "python")))
        return launchers[-1]

    yield make
    for folder in tmp_path.glob("sweeps/*/tasks/*"):
        (folder / "end").touch()
    for process in (process for launcher in launchers for process in launcher._processes.values()):
        process.wait()


def until(holds: Callable[[], bool]) -> None:
    """Return when it holds."""
    pause = threading.Event()
    while not holds():
        pause.wait(0.02)


def runs_of(folder: Path) -> int:
    """How often a run began in a trial's folder."""
    return len((folder / "began").read_text()) if (folder / "began").exists() else 0


def process_of(trial: SweepTrial, name: str) -> int:
    return int(report_in(trial.folder)[name].partition(":")[0])


@pytest.mark.long
def test_a_second_start_waits_for_what_the_first_one_started(
    workdir: Path, launcher: Callable[[], LocalLauncher]
) -> None:
    sweep = trials(seeds=(1, 2, 3))
    sweep.write()
    first, lines = launcher(), list[str]()
    for trial in sweep.trials[:2]:  # then the first command is killed
        write_state(trial.folder, state="stopped")  # by an earlier session
        first.start(_job(trial))
    until(lambda: all(runs_of(trial.folder) and "run" in report_in(trial.folder) for trial in sweep.trials[:2]))
    os.kill(process_of(sweep.trials[1], "process"), signal.SIGKILL)  # the supervisor of a run that lives on

    def say(line: str) -> None:
        lines.append(line)
        active = sum(trial.state.startswith(ACTIVE) for trial in sweep.trials)
        assert active <= 2 if "already" in line or line.startswith("trial 0") else active <= 1
        if line.startswith("trial 1 is running already"):
            (sweep.trials[0].folder / "end").touch()
        elif line == "trial 0 finished":
            (sweep.trials[1].folder / "end").touch()
        elif line.startswith("trial 2 started"):
            (sweep.trials[2].folder / "end").touch()

    run_here(launcher(), list(waiting(sweep, retry=False)), 1, say)
    assert [" ".join(line.split()[:3]) for line in lines] == [
        "trial 0 is",
        "trial 1 is",
        "trial 0 finished",
        "trial 1 failed",
        "trial 1 started:",
        "trial 1 finished",
        "trial 2 started:",
        "trial 2 finished",
    ]
    assert [trial.state for trial in sweep.trials] == ["finished"] * 3
    assert [runs_of(trial.folder) for trial in sweep.trials] == [1, 2, 1]  # the one without a report is asked again


@pytest.mark.long
def test_trials_that_the_sweep_no_longer_has_count_while_they_run(
    workdir: Path, launcher: Callable[[], LocalLauncher]
) -> None:
    old = trials(seeds=(1, 2))
    old.write()
    launcher().start(_job(old.trials[1]))
    until(lambda: runs_of(old.trials[1].folder) == 1)
    lines = list[str]()

    def say(line: str) -> None:
        lines.append(line)
        number = 1 if "already" in line else 0
        (old.trials[number].folder / "end").touch()

    run_here(launcher(), trials(seeds=(1,)).trials, 1, say)
    assert lines[0] == "trial 1 is running already: values that the sweep no longer has"
    assert [line.split()[1] for line in lines] == ["1", "1", "0", "0"]


def test_the_state_of_a_launch_is_that_of_its_processes(workdir: Path, launcher: Callable[[], LocalLauncher]) -> None:
    trial, started = trials(seeds=(1,)).trials[0], launcher()
    trials(seeds=(1,)).write()
    assert trial.state == "new"
    first = started.start(_job(trial))
    assert trial.state in ("starting", "running")
    until(lambda: runs_of(trial.folder) == 1 and trial.state == "running")
    run, supervisor = process_of(trial, "run"), process_of(trial, "process")
    assert first.id == report_in(trial.folder)["process"]
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not lives(first.id))
    assert trial.state == started.state(first) == "running"  # the run lives
    assert started.stop(first, now=False) == f"{first.name} is saving a checkpoint and will then end."
    until(lambda: not lives(process_id(run)))
    assert trial.state == started.state(first) == GONE
    assert started.stop(first, now=False) == f"{first.name} has ended already."
    second = started.start(_job(trial))
    assert trial.state == started.state(second) in ("starting", "running")
    (trial.folder / "end").touch()
    until(lambda: trial.state == "finished")
    third = started.start(_job(trial))  # at once: the report of the second one is no state of the third
    until(lambda: not lives(third.id))
    write_state(trial.folder, state="running", host="another")
    assert trial.state == "running"
    write_state(trial.folder, state="running", host=socket.gethostname(), process="1:1", run="1:1")
    assert trial.state == GONE


@pytest.mark.long
def test_one_command_at_a_time_starts_trials_of_a_sweep(workdir: Path, launcher: Callable[[], LocalLauncher]) -> None:
    write(workdir, seeds=[1])
    sweep = trials_of(load_sweep("sweep.toml"), {})
    sweep.write()
    with one_at_a_time(sweep.folder):
        result = command()
    assert isinstance(result.exception, UserError)
    assert f"another skyrl sweep trains the trials in {sweep.folder} (process {os.getpid()} on" in str(result.exception)
    launcher().start(_job(sweep.trials[0]))
    until(lambda: sweep.trials[0].state == "running")
    result = command("--on", "slurm")
    assert isinstance(result.exception, UserError)
    assert "trial 0 of this sweep is running (target local): wait for it, or end it" in str(result.exception)


def test_results_are_means_over_seeds_the_best_first(workdir: Path) -> None:
    sweep = trials(grid={LR: (1e-3, 2e-3)}, seeds=(1, 2))
    for trial, score in zip(sweep.trials, (0.2, 0.4, 0.5, 0.9), strict=True):
        trial.run_folder.mkdir(parents=True)
        lines = [{"step": 1, "eval/all/avg_score": score}, {"step": 2, "eval/all/avg_score": score / 2}]
        (trial.run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_state(trial.folder, state="finished")
    best, other = results(sweep.trials, "eval/all/avg_score", "max")
    assert (best.point, best.values, best.mean) == (f"{LR}=0.002", (0.5, 0.9), 0.7)
    assert other.mean == pytest.approx(0.3)
    assert best.spread == pytest.approx(0.2828, abs=1e-4)
    assert f"| 0.7 | ± 0.28 (2) | 2, 3 | {LR}=0.002 |" in table([best, other], "eval/all/avg_score")


def test_a_point_without_a_value_comes_last(workdir: Path) -> None:
    sweep_trials = trials(grid={LR: (1e-3, 2e-3)}).trials
    sweep_trials[1].run_folder.mkdir(parents=True)
    (sweep_trials[1].run_folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "los')
    assert [result.trials for result in results(sweep_trials, "loss", "min")] == [(1,), (0,)]


def test_a_dry_run_lists_the_runs_and_starts_none(workdir: Path) -> None:
    write(workdir, grid={LR: [1e-3, 2e-3]})
    result = command("--dry-run")
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["0", "new", f"{LR}=0.001"],
        ["1", "new", f"{LR}=0.002"],
    ]
    assert not (workdir / "sweeps").exists()


def test_an_unknown_metric_is_reported_before_training(workdir: Path) -> None:
    write(workdir, metric="eval/all/avg_scor", grid={LR: [1e-3]})
    result = command("--dry-run")
    assert result.exit_code == 0 and "skyrl has no metric eval/all/avg_scor" in result.stderr
    assert "did you mean eval/<set>/avg_score?" in result.stderr
    write(workdir, metric="eval/all/avg_score", grid={LR: [1e-3]})
    assert "no metric" not in command("--dry-run").stderr


@pytest.mark.long
def test_a_sweep_is_trained_resumed_and_compared(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    write(workdir, grid={LR: [1e-3, 2e-3]}, metric="reward/avg_raw_reward", at_once=2)
    result = command()
    assert result.exit_code == 0, result.output
    assert result.stdout.count("finished") == 2
    first = {file: file.stat().st_mtime_ns for file in workdir.glob("sweeps/s/tasks/*/run/metrics.jsonl")}
    assert len(first) == 2
    write(workdir, grid={LR: [1e-3, 2e-3, 3e-3]}, metric="reward/avg_raw_reward", at_once=2)
    resumed = command()
    assert "trial 2 started" in resumed.stdout and "trial 0" not in resumed.stdout
    assert {file: file.stat().st_mtime_ns for file in first} == first
    assert len(json.loads((workdir / "sweeps" / "s" / "results.json").read_text())) == 3
    assert (workdir / "sweeps" / "s" / "report.html").exists()
