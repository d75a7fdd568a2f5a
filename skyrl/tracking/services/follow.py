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

from skyrl.processes.redaction import RedactedStream
from skyrl.tracking.services.delivery import Delivery
from skyrl.tracking.services.service import ServiceRun

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
