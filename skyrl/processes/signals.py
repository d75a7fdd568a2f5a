"""The signals that stop a run, and the sentence that a stopped run ends with. Imports nothing heavy."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

from skyrl.errors import EXIT_REQUEUE, Stopped

STOPPED_BY = {signal.SIGTERM: "Stopped by SIGTERM", signal.SIGHUP: "Stopped by SIGHUP", signal.SIGINT: "Stopped"}
"""Beginning of the run's last message, by signal."""

RESUMES_FROM_LAST_CHECKPOINT = (
    "The same command continues from the last checkpoint, or starts from scratch if there is none."
)


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals to install handlers for. SIGHUP is left out if it is ignored already, as under `nohup`."""
    return tuple(item for item in STOPPED_BY if item != signal.SIGHUP or signal.getsignal(item) is not signal.SIG_IGN)


def stop_command(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler of a command that has nothing to save; a run installs its own (`ShutdownSignal`), and once it has
    been asked to stop, this one does not come back: the exit code of that request stays.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Stopped(f"Stopped by {signal.Signals(number).name}; nothing was saved.", EXIT_REQUEUE)
