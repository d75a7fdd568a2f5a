"""The run's side of a tracking service: a process that follows the run's folder, and a thread that supervises it.

The training loop only sets an event after each step. Everything that a service has not received yet is in
`metrics.jsonl`, so nothing is lost however long the service is down, and no queue can overflow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from skyrl.processes.logs import last_line
from skyrl.tracking.services.service import Known, ServiceRun
from skyrl.tracking.tracker import Tracker, Trackers

FIRST_PAUSE = 10.0
"""Seconds before a failed service is tried again; the pause doubles each time, up to `LONGEST_PAUSE`."""

LONGEST_PAUSE = 600.0

_GLANCE = 1.0
"""Seconds between checks that the process is still running, while no step ends."""


class Follower:
    """A tracker that keeps one service up to date. A service that fails is reported once, and tried again later."""

    def __init__(self, run: ServiceRun, say: Callable[[str], None]) -> None:
        """`say` prints a line about the run. The process starts with the first step."""
        self._run, self._say = run, say
        self._log = run.folder / "logs" / f"tracker_{run.service}.log"
        self._first = -1 if run.first_step is None else run.first_step
        self._last: int | None = None
        self._step, self._end, self._is_over = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look_after, name=f"tracker {run.service}", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._has_failed = False
        self._why = ""  # reason why the process could not be started

    @property
    def name(self) -> str:
        """The service's name."""
        return self._run.service

    @property
    def steps_behind(self) -> int:
        """Number of steps logged in this session that the service does not have yet."""
        if self._last is None:
            return 0
        return max(0, self._last - max(self._first, Known.read(self._run.state_file).step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last is None:
            self._thread.start()
        self._last = step
        self._step.set()

    def close(self) -> None:
        """Wait until the service has everything, for at most `finish_seconds`."""
        self._end.set()
        self._step.set()
        was_sending = False
        if self._last is not None:
            self._thread.join(self._run.settings.finish_seconds)
            was_sending = self._thread.is_alive()
            self._is_over.set()
            self._kill()
        if missing := self.steps_behind:
            self._say_how_to_deliver(f"lacks the last {missing} steps of this run")
        elif was_sending:
            waited = f"trackers.finish_seconds = {self._run.settings.finish_seconds:g}"
            self._say_how_to_deliver(f"was still sending after {waited}, and may lack steps of this run")

    def _say_how_to_deliver(self, lack: str) -> None:
        self._say(
            f"warning: {self.name} {lack}; deliver them with `skyrl track {self._run.folder} --to {self.name}` "
            f"(details: {self._log})"
        )

    def _look_after(self) -> None:
        """Keep the process running until the run ends, with pauses after each failure of the service."""
        pause, first_step = FIRST_PAUSE, self._run.first_step
        while True:
            is_last = self._end.is_set()
            try:
                code = self._follow(first_step)
            except OSError as error:  # no such interpreter, no memory, a full disk
                code, self._why = 1, str(error)
            if code == 0 or is_last or self._is_over.is_set():
                return
            self._report()
            self._end.wait(pause)  # one more attempt is made at the end of the run
            pause, first_step = min(2 * pause, LONGEST_PAUSE), None

    def _follow(self, first_step: int | None) -> int:
        """Run the process until the run or the process ends. Returns its exit code."""
        with self._start_process() as process:
            assert process.stdin is not None
            line = attrs.evolve(self._run, first_step=first_step).to_line()
            with contextlib.suppress(OSError):  # the process has already ended
                process.stdin.write(line)
                process.stdin.flush()
                os.set_blocking(process.stdin.fileno(), False)
                while process.poll() is None and not self._end.is_set():
                    with contextlib.suppress(BlockingIOError):  # the pipe is full: there is enough to read
                        process.stdin.write(b"\n")
                        process.stdin.flush()
                    while not self._step.wait(_GLANCE) and process.poll() is None:
                        pass
                    self._step.clear()
            with contextlib.suppress(OSError):
                process.stdin.close()
            return process.wait()

    @contextlib.contextmanager
    def _start_process(self) -> Iterator[subprocess.Popen[bytes]]:
        """The process, in a new session so that Ctrl-C reaches only the run. It is killed at the end, with its
        children.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command(self._run),
                env=environment(self._run),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                if self._is_over.is_set():  # the run ended since the last check
                    self._kill()
                yield self._process
            finally:
                self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _report(self) -> None:
        """Say once that the service failed, and why."""
        if self._has_failed or self._end.is_set():
            return
        self._has_failed = True
        reason = self._why or last_line(self._log) or "it ended without a word"
        self._say(
            f"warning: {self.name} failed, and the run continues without it: {reason}\n"
            f"  It is tried again; metrics are in {self._run.folder / 'metrics.jsonl'}, details in {self._log}"
        )


class WithLag:
    """Trackers that receive one more metric: how many steps each service is behind."""

    def __init__(self, trackers: Sequence[Tracker], followers: Sequence[Follower]) -> None:
        self._followers = tuple(followers)
        self._all = Trackers([*trackers, *followers])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        lags = {f"trackers/{follower.name}_steps_behind": float(follower.steps_behind) for follower in self._followers}
        self._all.log(step, {**metrics, **lags})

    def close(self) -> None:
        self._all.close()


def command(run: ServiceRun) -> list[str]:
    """Command line of the process that feeds the service. `-P` keeps the working directory out of the import path."""
    return [run.settings.python or sys.executable, "-P", "-m", "skyrl.tracking.services.follow"]


def environment(run: ServiceRun) -> dict[str, str]:
    """Environment of that process: the environment of the run, where the services' packages find their keys."""
    if run.settings.python:
        return dict(os.environ)
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
