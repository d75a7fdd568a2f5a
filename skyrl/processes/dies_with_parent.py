"""Runs a command that ends with the process that started it, however that process ends.

    python -m skyrl.processes.dies_with_parent COMMAND...

The standard input is a pipe that the starter holds open and writes nothing to. When it closes, the command and its
children get SIGTERM, and SIGKILL ten seconds later. The exit code is that of the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_GRACE_SECONDS = 10.0


def start_dependent(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the command, tied to this process; its output goes to the file `log`. Close `stdin` to end it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as written:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *command],
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
            env=os.environ | environment,
            start_new_session=True,
        )


def _end_with_the_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
        os.killpg(child.pid, signal.SIGKILL)


def main() -> None:
    """Run the command that this process's arguments give."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    watch = threading.Thread(target=_end_with_the_input, args=(child,), daemon=True)
    watch.start()
    code = child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its children
    os._exit(code if code >= 0 else 128 - code)  # the watching thread may still read


if __name__ == "__main__":
    main()
