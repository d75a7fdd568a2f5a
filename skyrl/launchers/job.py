"""Jobs that launchers start, and the record of them that `skyrl launch status`, `logs` and `stop` read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from skyrl.errors import UserError
from skyrl.processes.orphans import lives
from skyrl.storage.atomic import write_file
from skyrl.tree.files import stored_text

RECORD = "launch.json"
STATE = "state.json"
STOP = "stop"
"""File whose presence means that the launch must end and not be requeued."""

LOGS = "logs"
TASKS = "tasks"
"""Folder that contains a folder for each task of an array, named by its number."""

UNDER_WAY = ("starting", "running")
"""States of a report whose run has not ended."""

GONE = "failed (its process is gone)"
"""State of a run that has ended without a report."""

Target = Literal["local", "ray", "slurm"]


@attrs.frozen(kw_only=True)
class Machines:
    """Nodes and GPUs that a run uses."""

    nodes: int = 1
    per_node: int = 1
    """GPUs per node; slots if `device` is cpu."""

    device: Literal["cpu", "cuda"] = "cpu"
    on_ray: bool = False
    """Whether the run starts processes on Ray, which must then run on every node."""

    address_field: str = "trainer.placement.ray_address"
    """Path of the field that names the Ray cluster to join."""


@attrs.frozen(kw_only=True)
class Array:
    """Several runs of one launch, which differ only in their configuration."""

    tasks: tuple[int, ...]
    """Numbers of the runs. Each has a folder with its number and a `run.toml` in the folder `tasks` of the launch."""

    at_once: int = 1
    """Largest number of tasks that may run at the same time."""


@attrs.frozen(kw_only=True)
class Job:
    """A run to be started."""

    name: str
    folder: Path
    """Folder of the launch, absolute."""

    cwd: Path
    """Folder that the command runs in, absolute."""

    words: tuple[str, ...] = ()
    """Arguments of `run` after the configuration file."""

    machines: Machines = Machines()
    array: Array | None = None
    after: tuple[str, ...] = ()
    """Launches or Slurm jobs that must have succeeded before this one starts."""

    def started(self, target: Target, number: str, *, address: str = "", tasks: tuple[int, ...] = ()) -> Launch:
        """The launch of this job, by its id; writes its record."""
        launch = Launch(
            target=target,
            name=self.name,
            folder=self.folder,
            id=number,
            cwd=str(self.cwd),
            address=address,
            tasks=tasks,
            submitted=time.time(),
        )
        launch.write()
        return launch


@attrs.frozen(kw_only=True)
class Launch:
    """A record of something that was started."""

    target: Target
    name: str
    folder: Path
    id: str
    """Number of the Slurm job, id of the Ray job, or pid and start time of the local process."""

    cwd: str
    address: str = ""
    """Address of the Ray cluster."""

    tasks: tuple[int, ...] = ()
    submitted: float = 0.0
    """Seconds since 1970."""

    def write(self) -> None:
        """Store the record in the launch's folder."""
        plain = {**attrs.asdict(self), "folder": str(self.folder), "submitted": self.submitted or time.time()}
        write_file(self.folder / RECORD, json.dumps(plain, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Launch:
        """The launch of this folder. Raises `UserError` if the folder is not a launch."""
        try:
            plain = json.loads(stored_text(folder / RECORD))
            known = {field.name for field in attrs.fields(cls)}
            fields = {name: value for name, value in plain.items() if name in known}
            return cls(**{**fields, "folder": folder.absolute(), "tasks": tuple(plain.get("tasks", ()))})
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{folder} is not the folder of a launch: it has no {RECORD}") from None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder / RECORD} cannot be read: {error}") from None

    def state(self, task: int | None = None) -> dict[str, Any]:
        """The last report of the command itself: `state`, `code`, `host`; empty before it began."""
        return report_in(self.folder if task is None else self.folder / TASKS / str(task))

    def ask_to_stop(self) -> None:
        """Mark the launch as ending, so that it is not started again."""
        (self.folder / STOP).touch()


class Launcher(Protocol):
    """Starts, shows and stops launches of one target. Every method raises `UserError` or `ProcessError`."""

    def start(self, job: Job) -> Launch:
        """Start the job and write its record."""

    def state(self, launch: Launch) -> str:
        """The state in one or two words, such as `running`, `finished`, `waiting (Priority)`."""

    def stop(self, launch: Launch, *, now: bool) -> str:
        """Ask the run to save and to end, or end it at once. Returns a sentence on what was done."""


def new_folder(parent: Path, name: str) -> Path:
    """Make a folder for a launch: `NAME`, or `NAME-2` and so on if that is taken. Raises `UserError`."""
    plain = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.") or "run"
    number = 1
    while True:
        folder = parent.absolute() / (plain if number == 1 else f"{plain}-{number}")
        try:
            (folder / LOGS).mkdir(parents=True, mode=0o755)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"{folder} cannot be created: {error.strerror}") from None


def absent(folder: Path) -> list[Path]:
    """The folder and those around it that do not exist yet, the innermost first."""
    return [item for item in (folder, *folder.parents) if not item.exists()]


def withdraw(folder: Path, new_folders: Sequence[Path]) -> None:
    """Remove the folder of something that was not started, and the `new_folders` made for it, if they are empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # something else is in one of them by now
        for item in new_folders:
            item.rmdir()


def launches(parent: Path) -> Iterator[Launch]:
    """Launches below a folder, the oldest first."""
    records = [Launch.read(file.parent) for file in parent.glob(f"*/{RECORD}")]
    yield from sorted(records, key=lambda launch: launch.submitted)


def report_in(folder: Path) -> dict[str, Any]:
    """The last report of the command of a launch: `state`, `code`, `host`, and the processes `process`, which reports,
    and `run`; empty before it began.
    """
    try:
        report = json.loads(stored_text(folder / STATE))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def state_in(folder: Path) -> str:
    """State of the run that was started last in a folder: `new`, or the last report. A report of a run that is under
    way counts while one of its processes lives; `GONE` afterwards. Of another machine, a report is believed.
    """
    report, started = report_in(folder), None
    with contextlib.suppress(UserError):
        launch = Launch.read(folder)
        started = launch.id if launch.target == "local" else None  # the process that was started on this machine
    state = str(report.get("state", "new" if started is None else "starting"))
    if state not in UNDER_WAY or report.get("host", socket.gethostname()) != socket.gethostname():
        return state
    processes = (started, report.get("process"), report.get("run"))
    return state if any(lives(str(process)) for process in processes if process) else GONE


def forget_report(folder: Path) -> None:
    """Remove the report of an earlier run before another one is started in its folder."""
    (folder / STATE).unlink(missing_ok=True)


def write_state(folder: Path, **content: object) -> None:
    """Replace `state.json` atomically."""
    scratch = folder / f"{STATE}.{os.getpid()}"
    scratch.write_text(json.dumps({**content, "at": time.time()}) + "\n", encoding="utf-8")
    scratch.replace(folder / STATE)
