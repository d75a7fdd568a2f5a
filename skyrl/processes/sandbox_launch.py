"""Runs one program that nobody trusts: `python -I -S sandbox_launch.py LIMITS PROGRAM`, with LIMITS as JSON.

This file is a program of its own, of the standard library alone. It forks; the child limits itself and becomes the
program, the parent waits for it, for at most `seconds`, and ends every process that descends from it.
"""

import ctypes
import json
import os
import resource
import runpy
import signal
import sys
import time
from contextlib import suppress

_NO_NEW_PRIVILEGES, _PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 38, 1, 36
TIMED_OUT = 124


def main() -> None:
    """Launch, wait, sweep; the exit code is the program's, or 124 if it was late."""
    limits, program = json.loads(sys.argv[1]), sys.argv[2]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGTERM, _ended_from_outside)
    child = os.fork()
    if child == 0:
        _become(program, limits, libc)
    code = _wait(child, time.monotonic() + limits["seconds"])
    _sweep()
    os._exit(code)


def _ended_from_outside(*_: object) -> None:
    """Whoever started this does not want to wait: nothing is left behind all the same."""
    _sweep()
    os._exit(TIMED_OUT)


def _become(program: str, limits: dict[str, float], libc: ctypes.CDLL) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.setsid()
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (int(value), int(value)))
    sys.argv = [program]
    code = 1
    try:
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:  # noqa: BLE001  # its own business: the exit code says that it failed
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:2000])
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = 1
    os._exit(code & 255)


def _wait(child: int, deadline: float) -> int:
    """The child's exit code; 128 + the number of the signal that ended it."""
    pause = 0.0005
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    return TIMED_OUT


def _sweep() -> None:
    """Kill every descendant: those that lost their parents become children of this process, and are next."""
    while True:
        for pid in _children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    if int(stat.read().rpartition(b")")[2].split()[1]) == parent:
                        found.append(int(name))
            except (OSError, ValueError, IndexError):
                continue
    return found


if __name__ == "__main__":
    main()
