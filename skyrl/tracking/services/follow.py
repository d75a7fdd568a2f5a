"""The program that feeds one tracking service: `python -m skyrl.tracking.services.follow`, started by `follower.py`.

Its input is a line that describes the run, then one byte for each step that was written; the end of the input is the
end of the run. It is a separate process, so that nothing in a service's package affects the run: slow calls, exit
hooks, threads, changed streams, crashes. Any exception of a service ends this process, and `follower.py` starts it
again later.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import signal
import sys
from collections.abc import Iterator
from typing import TextIO, cast

import attrs

from skyrl.config.foundation.import_paths import load_builtin
from skyrl.config.settings.trackers import TRACKERS
from skyrl.processes.redaction import RedactedStream
from skyrl.storage.json_files import GrowingLines
from skyrl.tracking.services.run_files import SampleTables, evaluation_tables, stored_configuration
from skyrl.tracking.services.service import Known, Service, ServiceRun


class Delivery:
    """Feeds one service from `metrics.jsonl` and the files next to it."""

    def __init__(self, run: ServiceRun) -> None:
        self._run = run
        self._metrics = GrowingLines(run.folder / "metrics.jsonl")
        self._samples = SampleTables(run.folder / "trajectories.jsonl", run.settings.sample_rows)
        self._seen: dict[int, int] = {}  # step -> hash of its record in the file
        self._service = self._open()
        self._shown = self._service.known.step  # tables up to this step are delivered

    def deliver(self, *, at_end: bool = False) -> None:
        """Deliver what was written since the last call; `at_end`: the run has ended and its files are complete."""
        for record in self._metrics.new():
            step, mark = int(record.pop("step")), hash(frozenset(record.items()))
            if self._seen.get(step) != mark:  # an equal record is from a file that was replaced and is read again
                self._deliver_step(step, record, is_changed=step in self._seen)
                self._seen[step] = mark
        if at_end:
            self._show_samples(math.inf)

    def close(self) -> None:
        """Close the service and store its progress; everything is in the service when this returns."""
        self._service.close()
        self._keep(self._service.known)

    def _open(self) -> Service:
        run, known = self._run, Known.read(self._run.state_file)
        service: Service = load_builtin(TRACKERS[run.service].tracker_class).of_run(run, known)
        first, last = run.first_step, service.known.step
        if first is not None and first < last and not service.rewind(first):
            service.known = attrs.evolve(service.known, lost=(*service.known.lost, f"{first + 1}-{last}"))
        self._keep(service.known)
        lost = {"steps_of_killed_sessions": service.known.lost} if service.known.lost else {}
        service.describe(stored_configuration(run.folder) | lost)
        return service

    def _show_samples(self, before: float) -> None:
        for table in self._samples.before(before):
            if table.step > self._shown:
                self._service.table(table)
                self._shown = table.step

    def _deliver_step(self, step: int, metrics: dict[str, float], *, is_changed: bool) -> None:
        """Deliver a step unless the service has it. If the run went back, replace the later steps if the service can.

        `is_changed`: the file had a different record of the step before.
        """
        service = self._service
        if is_changed and service.rewind(step - 1):
            self._seen = {item: mark for item, mark in self._seen.items() if item < step}
            self._shown = min(self._shown, step - 1)
        self._show_samples(step)
        if step <= service.known.step:
            return
        service.log(step, metrics)
        for table in evaluation_tables(self._run.evaluations, step, self._run.settings.sample_rows):
            service.table(table)
        service.known = attrs.evolve(service.known, step=step)
        self._keep(service.known)

    def _keep(self, known: Known) -> None:
        known.write(self._run.state_file)


IN_USE = 3
"""Exit code if another process feeds the same service from the same folder."""

QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Variables that turn off telemetry and messages of the services' packages."""

IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Variables that make a package report failures early, unless the user sets them: `follower.py` retries for longer."""


def follow(run: ServiceRun, *, wait: bool) -> int:
    """Deliver steps as they are written until the input ends, then the rest. With `wait`, first wait for another
    process that feeds the same service, which ends within its deadline. Returns the exit code.
    """
    with _locked(run, wait=wait) as is_free:
        if not is_free:
            print(f"Another process feeds {run.service} from {run.folder}: the run is still going.", file=sys.stderr)
            return IN_USE
        delivery = None
        while _steps():
            delivery = delivery or Delivery(run)
            delivery.deliver()
        if wait:
            signal.alarm(max(1, math.ceil(run.settings.finish_seconds)))  # the parent may no longer be there to do it
        delivery = delivery or Delivery(run)
        delivery.deliver(at_end=True)
        delivery.close()
    return 0


def _steps() -> bytes:
    """Wait for steps and return one byte for each since the last call; empty at the end of the run."""
    assert isinstance(sys.stdin.buffer, io.BufferedReader)
    return sys.stdin.buffer.read1(65_536)


@contextlib.contextmanager
def _locked(run: ServiceRun, *, wait: bool) -> Iterator[bool]:
    """Holds the lock of this service in the run's folder; yields False if another process holds it."""
    run.state_file.parent.mkdir(parents=True, exist_ok=True)
    with run.state_file.with_suffix(".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def main() -> int:
    """Read the run from standard input, and follow it. With `--replay`, the run has already ended."""
    os.environ.update({**QUIET, **{name: value for name, value in IMPATIENT.items() if name not in os.environ}})
    run = ServiceRun.of_line(sys.stdin.buffer.readline())
    sys.stdout, sys.stderr = (cast(TextIO, RedactedStream(stream)) for stream in (sys.stdout, sys.stderr))
    return follow(run, wait="--replay" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
