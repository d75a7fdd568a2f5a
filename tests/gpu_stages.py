"""Stages of `test_gpu_session.py`, which run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading

from benchmarks.gpu_session.stages import Job, Parts, Result


def _fails() -> Result:
    raise ValueError("no such kernel\nand more")


def one_fails(job: Job) -> Parts:
    yield "first", lambda: {"seconds": 2.0}
    yield "second", _fails
    yield "third", lambda: {"seconds": 3.0}


def blocks(job: Job) -> Parts:
    """Measures something, then waits forever, as does a process that it has started in a session of its own."""

    def wait() -> Result:
        forever = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        other = subprocess.Popen(forever, start_new_session=True)
        (job.work / "blocked").write_text(str(other.pid))
        threading.Event().wait()
        return {}

    yield "first", lambda: {"seconds": 2.0}
    yield "never", wait


def counts(job: Job) -> Parts:
    """Its second measurement fails the first time; both note that they were called."""

    def note(name: str) -> Result:
        with (job.work / "calls").open("a") as calls:
            calls.write(f"{name}\n")
        return {"seconds": 1.0}

    def second() -> Result:
        was_tried = (job.work / "tried").exists()
        (job.work / "tried").touch()
        return note("second") if was_tried else _fails()

    yield "first", lambda: note("first")
    yield "second", second
