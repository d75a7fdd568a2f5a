"""Jobs and clusters for the tests of launchers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from skyrl.config.cluster import ClusterConfig, load_cluster
from skyrl.launchers.job import Job, Machines
from skyrl.launchers.slurm import SCRIPT, script_of


def cluster(*words: str) -> ClusterConfig:
    """The default cluster with these changes."""
    return load_cluster(None, words)


def job(folder: Path, **changes: Any) -> Job:
    """A job with a folder that exists."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    defaults: dict[str, Any] = {
        "name": "mine",
        "folder": folder,
        "cwd": folder.parent,
        "machines": Machines(per_node=2),
    }
    return Job(**{**defaults, **changes})


def options(script: str) -> list[str]:
    """What sbatch reads of a script."""
    lines = script.splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


class Stubs:
    """Stand-ins of srun and scontrol: what they are given is written down, and srun ends as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs = folder / "programs"
        self._programs.mkdir(parents=True)
        self._write("srun", 'printf "%s\\0" "$@" > "$STUBS/srun.words"; $SRUN_DOES; exit "$SRUN_CODE"')
        self._write("scontrol", 'echo "$@" >> "$STUBS/scontrol.words"')

    def run(
        self, of: Job, cluster: ClusterConfig, code: int = 0, *, also: str = ":"
    ) -> subprocess.CompletedProcess[str]:
        """Run the job's script under bash, as Slurm would; `also` is a command that srun runs before it ends."""
        script = of.folder / SCRIPT
        script.write_text(script_of(of, cluster, "/usr/bin/python3"))
        environment = {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "STUBS": str(self.folder),
            "SRUN_CODE": str(code),
            "SRUN_DOES": also,
            "SLURM_JOB_ID": "7",
        }
        return subprocess.run(
            ["bash", str(script)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # so that a signal to its process group reaches the job alone
        )

    def words(self, program: str) -> list[str]:
        """Words that a stand-in was last given; none if it was not called."""
        file = self.folder / f"{program}.words"
        text = file.read_text() if file.exists() else ""
        return text.split("\0")[:-1] if "\0" in text else text.split()

    def _write(self, name: str, body: str) -> None:
        file = self._programs / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
