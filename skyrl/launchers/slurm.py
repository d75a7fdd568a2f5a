"""Slurm jobs, controlled with Slurm's commands: sbatch, squeue, scontrol, scancel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve

from skyrl.config.cluster import ClusterConfig
from skyrl.errors import ProcessError, UserError
from skyrl.launchers.job import RECORD, STOP, TASKS, Job, Launch, forget_report
from skyrl.launchers.node import make_token
from skyrl.launchers.sbatch import SCRIPT, script_of
from skyrl.storage.atomic import write_file

Command = Callable[[Sequence[str]], str]
"""Runs a command of Slurm and returns its output. Raises `ProcessError`."""

_SECONDS = 60.0
_WORDS = {
    "PENDING": "waiting",
    "CONFIGURING": "starting",
    "RUNNING": "running",
    "COMPLETING": "ending",
    "COMPLETED": "finished",
    "CANCELLED": "stopped",
    "REQUEUED": "waiting",
    "TIMEOUT": "failed (time limit)",
    "OUT_OF_MEMORY": "failed (out of memory)",
    "NODE_FAIL": "failed (a node was lost)",
}


def slurm_command(words: Sequence[str]) -> str:
    """Output of a command of Slurm. Raises `UserError` if Slurm is missing, `ProcessError` if it refuses."""
    try:
        result = subprocess.run(list(words), capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        raise UserError(f"{words[0]} is not installed here: run this on a login node of the Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise ProcessError(f"{words[0]} gave no answer within {_SECONDS:g} s: is slurmctld running?") from None
    if result.returncode:
        text = result.stderr.strip() or result.stdout.strip()
        lines = (line.strip().removeprefix(f"{words[0]}: ").removeprefix("error: ") for line in text.splitlines())
        message = "; ".join(line for line in lines if line)
        raise ProcessError(f"{words[0]}: {message or f'exit code {result.returncode}'}")
    return result.stdout


class SlurmLauncher:
    """Starts runs as jobs of the Slurm cluster that this machine belongs to."""

    def __init__(self, cluster: ClusterConfig, python: str, command: Command = slurm_command) -> None:
        self._cluster, self._python, self._command = cluster, python, command

    def start(self, job: Job) -> Launch:
        """Write the script into the launch's folder and submit it. Raises `UserError` and `ProcessError`."""
        job = evolve(job, after=tuple(map(self._number, job.after)))
        script = job.folder / SCRIPT
        write_file(script, script_of(job, self._cluster, self._python))
        if job.machines.on_ray:
            make_token(job.folder)
        (job.folder / STOP).unlink(missing_ok=True)
        tasks = job.array.tasks if job.array else ()
        for folder in (job.folder, *(job.folder / TASKS / str(task) for task in tasks)):
            forget_report(folder)
        number = self._command(["sbatch", "--parsable", str(script)]).strip().partition(";")[0]
        return job.started("slurm", number, tasks=tasks)

    def state(self, launch: Launch) -> str:
        """The state according to Slurm; for a job that Slurm has forgotten, the last report of the run."""
        try:
            rows = self._command(["squeue", "-h", "-o", "%T|%r", "-j", launch.id]).split("\n")
        except ProcessError as error:
            if "Invalid job id" not in str(error):
                raise
            rows = []
        queued = [row.partition("|") for row in rows if "|" in row]
        if queued:
            states = {_word(state, reason) for state, _, reason in queued}
            return ", ".join(sorted(states))
        return self._forgotten(launch)

    def stop(self, launch: Launch, *, now: bool) -> str:
        """Ask the run to save and end. A waiting job, or any job if `now`, is cancelled."""
        state = self.state(launch)
        launch.ask_to_stop()
        if now or not state.startswith(("running", "starting", "ending")) or launch.tasks:
            self._command(["scancel", launch.id])
            return f"{launch.name} (job {launch.id}) was cancelled."
        self._command(["scancel", "--batch", "--signal=USR1", launch.id])
        return f"{launch.name} (job {launch.id}) is saving a checkpoint and will then end."

    def _forgotten(self, launch: Launch) -> str:
        try:
            output = self._command(["scontrol", "show", "job", "-o", launch.id])
            states = re.findall(r"\bJobState=(\w+)", output)
        except ProcessError:
            states = []
        reported = [launch.state(task).get("state", "") for task in launch.tasks or (None,)]
        words = {_WORDS.get(state, f"failed ({state.lower()})") for state in states} or {
            item for item in reported if item
        }
        return ", ".join(sorted(words)) or "unknown: Slurm has forgotten this job, and it reported nothing"

    def _number(self, after: str) -> str:
        """Number of the Slurm job that `after` names: itself, or the folder of a launch. Raises `UserError`."""
        if re.fullmatch(r"[0-9]+", after):
            return after
        folder = Path(after)
        if not (folder / RECORD).exists():
            raise UserError(f"--after {after}: neither the number of a Slurm job nor the folder of a launch")
        launch = Launch.read(folder)
        if launch.target != "slurm":
            raise UserError(f"--after {after}: that launch is not a Slurm job (its target is {launch.target})")
        return launch.id


def _word(state: str, reason: str) -> str:
    word = _WORDS.get(state, state.lower())
    return f"{word} ({reason})" if word == "waiting" and reason not in ("", "None") else word
