"""Runs as jobs of a running Ray cluster."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from skyrl.config.cluster import ClusterConfig
from skyrl.errors import UserError
from skyrl.launchers.job import Job, Launch, forget_report

if TYPE_CHECKING:
    from skyrl.processes.ray.jobs import RayJobs

_WORDS = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


class RayLauncher:
    """Submits runs to the cluster at `cluster.ray.address`, whose machines must mount the folders of this one."""

    def __init__(self, cluster: ClusterConfig, python: str) -> None:
        self._cluster, self._python = cluster, python
        self._jobs: RayJobs | None = None

    def start(self, job: Job) -> Launch:
        """Submit the job. Raises `UserError` and `ProcessError`."""
        if job.after or job.array:
            raise UserError("jobs of Ray start at once: --after needs the target slurm")
        address = self._cluster.ray.address
        forget_report(job.folder)
        variables = {"PYTHONUNBUFFERED": "1", **self._cluster.variables}
        number = self._connected(address).submit(self.command(job), f"{job.folder.name}-{time.time_ns()}", variables)
        return job.started("ray", number, address=address)

    def command(self, job: Job) -> str:
        """The shell command that Ray runs on its head."""
        words = [self._cluster.python or self._python, "-m", "skyrl.cli", "launch", "node", "--folder", str(job.folder)]
        words += ["--", "run", str(job.folder / "run.toml"), *job.words]
        if job.machines.on_ray:
            words += [f"{job.machines.address_field}=auto"]
        return f"cd {shlex.quote(str(job.cwd))} && exec {shlex.join(words)}"

    def state(self, launch: Launch) -> str:
        """The state of the job according to Ray."""
        state = self._connected(launch.address).state(launch.id)
        reported = launch.state().get("state")
        return "stopped" if reported == "stopped" else _WORDS.get(state, state.lower())

    def logs(self, launch: Launch) -> str:
        """The whole output of the run."""
        return self._connected(launch.address).logs(launch.id)

    def stop(self, launch: Launch, *, now: bool) -> str:
        """Make Ray send SIGTERM, then SIGKILL some seconds later."""
        launch.ask_to_stop()
        self._connected(launch.address).stop(launch.id)
        return f"{launch.name} was asked to save and end; Ray ends it after some seconds."

    def _connected(self, address: str) -> RayJobs:
        if self._jobs is None:
            from skyrl.processes.ray.jobs import RayJobs

            self._jobs = RayJobs(address)
        return self._jobs
