"""Runs the trials of a sweep that are not trained yet, a bounded number at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl.config.cluster import ClusterConfig
from skyrl.errors import UserError
from skyrl.launchers.job import LOGS, RECORD, Array, Job, Launch, Launcher, Machines
from skyrl.launchers.prepared import machines_of
from skyrl.sweeps.trials import Trial, Trials, spelled

ACTIVE = ("waiting", "starting", "running", "ending")
"""First words of the states of launches that have not ended."""

_LOOK_SECONDS = 0.5


def run_here(launcher: Launcher, trials: Sequence[Trial], at_once: int, say: Callable[[str], None]) -> None:
    """Start each trial as a separate launch and wait for all; on Ctrl-C or SIGTERM, running trials save and end."""
    waiting, running, pause = list(trials), dict[int, tuple[Trial, Launch]](), threading.Event()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                trial = waiting.pop(0)
                running[trial.number] = trial, launcher.start(_job(trial))
                say(f"trial {trial.number} started: {spelled(trial.point)}")
            _note_the_ended(launcher, running, say)
            if running:
                pause.wait(_LOOK_SECONDS)
    except BaseException:
        for _, launch in running.values():
            launcher.stop(launch, now=False)
        while running:
            _note_the_ended(launcher, running, say)
            pause.wait(_LOOK_SECONDS)
        raise


def submit_array(launcher: Launcher, trials: Trials, chosen: Sequence[Trial], at_once: int, name: str) -> Launch:
    """Submit the trials as one Slurm array. Each task requests the resources of the largest trial."""
    (trials.folder / LOGS).mkdir(exist_ok=True)
    array = Array(tasks=tuple(trial.number for trial in chosen), at_once=at_once)
    return launcher.start(Job(name=name, folder=trials.folder, cwd=Path.cwd(), array=array, machines=_largest(chosen)))


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


def _job(trial: Trial) -> Job:
    (trial.folder / LOGS).mkdir(exist_ok=True)
    machines = machines_of(trial.run, ClusterConfig())
    return Job(name=trial.run_folder.parent.name, folder=trial.folder, cwd=Path.cwd(), machines=machines)


def _note_the_ended(launcher: Launcher, running: dict[int, tuple[Trial, Launch]], say: Callable[[str], None]) -> None:
    for number, (trial, launch) in list(running.items()):
        state = launcher.state(launch)
        if not state.startswith(ACTIVE):
            del running[number]
            log = trial.folder / LOGS
            say(f"trial {number} {state}" + (f": see {log}" if state.startswith("failed") else ""))


def _largest(trials: Sequence[Trial]) -> Machines:
    needs = [machines_of(trial.run, ClusterConfig()) for trial in trials]
    first = needs[0]
    return Machines(
        nodes=max(need.nodes for need in needs),
        per_node=max(need.per_node for need in needs),
        device="cuda" if any(need.device == "cuda" for need in needs) else "cpu",
        on_ray=any(need.on_ray for need in needs),
        address_field=first.address_field,
    )
