"""Runs the trials of a sweep that are not trained yet, a bounded number at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from skyrl.config.cluster import ClusterConfig
from skyrl.errors import Stopped, UserError
from skyrl.launchers.job import GONE, LOGS, RECORD, TASKS, Array, Job, Launch, Launcher, Machines, state_in
from skyrl.launchers.prepared import machines_of
from skyrl.runs.run_owner import LOCK, owner, sign, unsign
from skyrl.sweeps.trials import SweepTrial, Trials, spelled

ACTIVE = ("waiting", "starting", "running", "ending")
"""First words of the states of launches that have not ended."""

_LOOK_SECONDS = 0.5


def run_here(launcher: Launcher, trials: Sequence[SweepTrial], at_once: int, say: Callable[[str], None]) -> None:
    """Start each trial as a separate launch and wait for all; on Ctrl-C or SIGTERM, running trials save and end.

    Trials that an earlier command has started and that still run are not started again, but waited for and counted.
    """
    by_number = {trial.number: trial for trial in trials}
    running: dict[int, Launch] = {}  # those of values that the sweep no longer has included
    for launch in _launches_in(trials[0].folder.parent) if trials else ():
        if launcher.state(launch).startswith(ACTIVE):
            number = int(launch.folder.name)
            running[number] = launch
            point = spelled(by_number[number].point) if number in by_number else "values that the sweep no longer has"
            say(f"trial {number} is running already: {point}")
    waiting, pause = [trial for trial in trials if trial.number not in running], threading.Event()
    restarted = set[int]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                trial = waiting.pop(0)
                running[trial.number] = launcher.start(_job(trial))
                say(f"trial {trial.number} started: {spelled(trial.point)}")
            for number, state in _note_the_ended(launcher, running, say):
                # One whose process is gone may have finished all the same, and is started once more.
                if state == GONE and number in by_number and number not in restarted:
                    restarted.add(number)
                    waiting.insert(0, by_number[number])
            if running:
                pause.wait(_LOOK_SECONDS)
    except BaseException as error:
        for launch in running.values():
            launcher.stop(launch, now=False)
        ended = len(running)
        while running:
            _note_the_ended(launcher, running, say)
            pause.wait(_LOOK_SECONDS)
        if isinstance(error, Stopped):
            message = f"The sweep was stopped, and running trials with it: {ended}. The same command continues them."
            raise Stopped(message, error.exit_code) from None
        raise


def _launches_in(tasks: Path) -> list[Launch]:
    return [Launch.read(file.parent) for file in sorted(tasks.glob(f"[0-9]*/{RECORD}"))]


def refuse_other_targets(folder: Path, target: str) -> None:
    """Raise `UserError` if a trial of the sweep in this folder runs on another target: it would be trained twice."""
    for launch in _launches_in(folder / TASKS):
        if launch.target != target and (state := state_in(launch.folder)).startswith(ACTIVE):
            raise UserError(
                f"trial {launch.folder.name} of this sweep is {state} (target {launch.target}): wait for it, or end it "
                f"(skyrl launch stop {launch.folder})"
            )


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Context in which no other command starts trials of the sweep in this folder. Raises `UserError` if one does."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"another skyrl sweep trains the trials in {folder} ({owner(folder)}): wait for its end, or stop it"
        ) from None
    try:
        sign(folder)
        yield
    finally:
        unsign(folder)
        lock.release()


def submit_array(launcher: Launcher, trials: Trials, chosen: Sequence[SweepTrial], at_once: int, name: str) -> Launch:
    """Submit the trials as one Slurm array. Each task requests the resources of the largest trial."""
    (trials.folder / LOGS).mkdir(exist_ok=True)
    array = Array(tasks=tuple(trial.number for trial in chosen), at_once=at_once)
    needs = [machines_of(trial.run, ClusterConfig()) for trial in chosen]
    largest = Machines(
        nodes=max(need.nodes for need in needs),
        per_node=max(need.per_node for need in needs),
        device="cuda" if any(need.device == "cuda" for need in needs) else "cpu",
        on_ray=any(need.on_ray for need in needs),
        address_field=needs[0].address_field,
    )
    return launcher.start(Job(name=name, folder=trials.folder, cwd=Path.cwd(), array=array, machines=largest))


def refuse_while_it_runs(folder: Path, launcher: Launcher) -> None:
    """Raises `UserError` if an array of this sweep is waiting or running: its trials would be trained twice."""
    if (folder / RECORD).exists():
        launch = Launch.read(folder)
        state = launcher.state(launch)
        if any(word.startswith(ACTIVE) for word in state.split(", ")):
            raise UserError(
                f"job {launch.id} of this sweep is {state}: wait for it (skyrl launch status {folder}), or end it "
                f"(skyrl launch stop {folder})"
            )


def _job(trial: SweepTrial) -> Job:
    (trial.folder / LOGS).mkdir(exist_ok=True)
    machines = machines_of(trial.run, ClusterConfig())
    return Job(name=trial.run_folder.parent.name, folder=trial.folder, cwd=Path.cwd(), machines=machines)


def _note_the_ended(
    launcher: Launcher, running: dict[int, Launch], say: Callable[[str], None]
) -> list[tuple[int, str]]:
    """Remove the launches that have ended from `running`. Returns their numbers and states."""
    ended = []
    for number, launch in list(running.items()):
        state = launcher.state(launch)
        if not state.startswith(ACTIVE):
            del running[number]
            ended.append((number, state))
            say(f"trial {number} {state}" + (f": see {launch.folder / LOGS}" if state.startswith("failed") else ""))
    return ended
