"""The signals that stop a run, and the sentence that a stopped run ends with. Imports nothing heavy."""

from __future__ import annotations

import signal

STOPPED_BY = {signal.SIGTERM: "Stopped by SIGTERM", signal.SIGHUP: "Stopped by SIGHUP", signal.SIGINT: "Stopped"}
"""Beginning of the run's last message, by signal."""

GOES_ON_FROM_THE_LAST = "The same command continues from the last checkpoint, or starts from scratch if there is none."


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals to install handlers for. SIGHUP is left out if it is ignored already, as under `nohup`."""
    return tuple(each for each in STOPPED_BY if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN)
