"""Runs on this machine that outlive the terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess

from skyrl.config.cluster import ClusterConfig
from skyrl.errors import UserError
from skyrl.launchers.job import LOGS, Job, Launch, forget_report, state_in
from skyrl.processes.orphans import lives, process_id
from skyrl.storage.atomic import write_file

SCRIPT = "run.sh"


class LocalLauncher:
    """Starts runs in the background of this machine."""

    def __init__(self, cluster: ClusterConfig, python: str) -> None:
        self._cluster, self._python = cluster, python
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: Job) -> Launch:
        """Start the job in a new session, with its output in the launch's folder. Raises `UserError`."""
        if job.after or job.array:
            raise UserError("runs on this machine start at once: --after needs the target slurm")
        forget_report(job.folder)
        script = job.folder / SCRIPT
        write_file(script, local_script(job, self._cluster, self._python))
        with (job.folder / LOGS / "local.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=job.cwd,
                start_new_session=True,
            )
        launch = job.started("local", process_id(process.pid))
        self._processes[launch.id] = process
        return launch

    def state(self, launch: Launch) -> str:
        """The last report of the run, unless its processes are gone."""
        if (process := self._processes.get(launch.id)) is not None:
            process.poll()  # an ended child stays a zombie until it is polled
        return state_in(launch.folder)

    def stop(self, launch: Launch, *, now: bool) -> str:
        """Ask the run to save and end, or end it at once if `now`."""
        launch.ask_to_stop()
        report = launch.state()
        supervisors = [process for process in (launch.id, str(report.get("process"))) if lives(process)]
        run = str(report.get("run"))
        orphans = [run] if not supervisors and lives(run) else []
        for process in supervisors[:1] or orphans:
            kill = signal.SIGQUIT if supervisors else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.partition(":")[0]), kill if now else signal.SIGTERM)
        if not supervisors and not orphans:
            return f"{launch.name} has ended already."
        return f"{launch.name} was ended." if now else f"{launch.name} is saving a checkpoint and will then end."


def local_script(job: Job, cluster: ClusterConfig, python: str) -> str:
    """The bash script that runs the job."""
    lines = ["#!/bin/bash", "set -eo pipefail", f"cd {shlex.quote(str(job.cwd))}", "export PYTHONUNBUFFERED=1"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in cluster.variables.items()]
    lines += cluster.prologue
    words = [python, "-m", "skyrl.cli", "launch", "node", "--folder", str(job.folder), "--"]
    words += ["run", str(job.folder / "run.toml"), *job.words]
    return "\n".join([*lines, f"exec {shlex.join(words)}"]) + "\n"
