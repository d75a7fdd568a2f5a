"""Writes `progress.json` into a run's folder once a second, for tools that show what the run is doing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from skyrl.errors import Stopped
from skyrl.launchers.supervised import UNFINISHED
from skyrl.processes.machine_facts import resident_bytes
from skyrl.processes.orphans import process_id
from skyrl.processes.progress import Progress
from skyrl.processes.redaction import redacted_tree
from skyrl.storage.atomic import write_file
from skyrl.tracking.run_progress import FILE

EVERY = 1.0
"""Seconds between two writes."""


class ProgressFile:
    """Keeps the file current from the beginning of a session to its end. Errors of the disk are ignored."""

    def __init__(self, folder: Path, progress: Progress, *, name: str, total_steps: int, first_step: int) -> None:
        """`first_step` is the step at which the session begins."""
        self._path, self._progress = folder / FILE, progress
        own = {"pid": os.getpid(), "process": process_id(os.getpid()), "host": socket.gethostname()}
        self._fixed = {**own, "name": name, "total_steps": total_steps, "first_step": first_step}
        self._unfinished = os.environ.get(UNFINISHED)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="skyrl-progress", daemon=True)

    def __enter__(self) -> Self:
        self.write("running")
        if self._unfinished is not None:
            with contextlib.suppress(OSError):
                Path(self._unfinished).touch()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        stopped = kind is not None and issubclass(kind, Stopped | KeyboardInterrupt)
        self.write("finished" if kind is None else "stopped" if stopped else "failed")
        if self._unfinished is not None and kind is None:
            with contextlib.suppress(OSError):
                Path(self._unfinished).unlink()

    def write(self, state: str) -> None:
        """Replace the file with the current state."""
        waits = [(wait.target, round(wait.seconds, 1)) for wait in self._progress.open_waits()]
        text = json.dumps(
            redacted_tree(
                {
                    "state": state,
                    **self._fixed,
                    "waits": waits,
                    "details": self._progress.details() if waits else "",
                    "warning": self._progress.warning,
                    "memory_bytes": resident_bytes(),
                }
            )
        )
        with contextlib.suppress(OSError):
            write_file(self._path, text, durable=False)

    def _write_on(self) -> None:
        while not self._ended.wait(EVERY):
            self.write("running")
