"""Runs a command to its end and records its state in a file; every launcher starts runs this way."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from skyrl.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from skyrl.launchers.job import write_state
from skyrl.processes.orphans import process_id

UNFINISHED = "SKYRL_UNFINISHED"
"""Variable with a file that a launched run makes when it begins, and removes at its regular end."""

_ENDINGS = {0: "finished", EXIT_REQUEUE: "stopped", EXIT_INTERRUPTED: "stopped"}
_LOOK_SECONDS = 0.5


def supervise(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], stop_file: Path | None = None
) -> int:
    """Run a command to its end and return its exit code; its state is written to `state.json` in `folder`.

    With `stop_file`, a scheduler delivers its signals to the command itself, which also gets SIGTERM when this file
    appears. Without it, only the first signal to stop is passed on to the command, which runs in a new session: a
    second signal would end the run before it has saved. SIGQUIT kills it.

    A run that ends with 0 in the middle, such as by `os._exit` of a user's code, has failed with exit code 1.
    """
    own, unfinished = os.getpid(), folder.absolute() / "unfinished"
    unfinished.unlink(missing_ok=True)
    facts = {"host": socket.gethostname(), "pid": own, "process": process_id(own), "began": time.time()}
    write_state(folder, state="starting", **facts)
    receiver = _Receiver(passes_on=stop_file is None)
    with handling((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT), receiver.handle):
        child = subprocess.Popen(command, env={**environment, UNFINISHED: str(unfinished)}, start_new_session=True)
        receiver.starts(child.pid)
        facts["run"] = process_id(child.pid)
        write_state(folder, state="running", **facts)
        with _watching(stop_file, receiver):
            code = child.wait()
    code = 128 - code if code < 0 else code
    if code == 0 and unfinished.exists():
        ended = f"something in it ended its process {child.pid} (os._exit?)."
        print(f"The run did not reach its end: {ended}", file=sys.stderr)
        code = 1
    write_state(folder, state=_ENDINGS.get(code, "failed"), code=code, **facts)
    return code


class _Receiver:
    """Receives requests to stop, from signals and from the file; only the first is sent to the command."""

    def __init__(self, *, passes_on: bool) -> None:
        self._passes_on, self._pid, self._wanted = passes_on, 0, 0

    def starts(self, pid: int) -> None:
        """Set the process of the command, and send it a stop request that came before."""
        self._pid = pid
        if self._wanted:
            _send(pid, self._wanted)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send the command a signal to stop, unless it already got one."""
        if not self._wanted:
            self._wanted = number
            if self._pid:
                _send(self._pid, number)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handler of the signals of this process."""
        if number == signal.SIGQUIT:
            with contextlib.suppress(ProcessLookupError):
                if self._pid:
                    os.killpg(self._pid, signal.SIGKILL)
        elif self._passes_on:
            self.stop(number)
        else:
            self._wanted = self._wanted or number  # the command received it, too


@contextlib.contextmanager
def handling(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Context in which these signals of the process have another handler."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def _watching(stop_file: Path | None, receiver: _Receiver) -> Iterator[None]:
    """Context in which the command is stopped when the file `stop_file` appears."""
    ended = threading.Event()

    def watch(file: Path) -> None:
        while not ended.wait(_LOOK_SECONDS):
            if file.exists():
                receiver.stop()
                return

    thread = threading.Thread(target=watch, args=(stop_file,), name="skyrl-ask", daemon=True)
    if stop_file is not None:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
