"""Handles signals in a script that makes models and data: it ends with one line and the conventional exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from skyrl.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Stopped
from skyrl.processes.signals import STOPPED_BY, handled_signals

EXIT_TERMINATED = 143
"""Exit code after SIGTERM, by the convention of shells: 128 + SIGTERM."""


@contextmanager
def stopped_in_words() -> Iterator[None]:
    """Context for a script: Ctrl-C ends it with one line and exit code 130, SIGTERM and SIGHUP with 143.

    A training run inside it uses its own signal handlers. Use it in the main thread only.
    """
    signal_numbers = [
        number for number in handled_signals() if number != signal.SIGINT
    ]  # Python raises KeyboardInterrupt
    before = {number: signal.signal(number, _stop) for number in signal_numbers}
    try:
        yield
    except (KeyboardInterrupt, Stopped) as stop:
        by, code = stop_message(stop)
        print(f"{by}. Incomplete files were removed: the same command starts from scratch.", file=sys.stderr)
        sys.exit(code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_message(stop: KeyboardInterrupt | Stopped) -> tuple[str, int]:
    """The beginning of a sentence, such as `Stopped by SIGTERM`, and the conventional exit code."""
    if isinstance(stop, KeyboardInterrupt):
        return STOPPED_BY[signal.SIGINT], EXIT_INTERRUPTED
    by = next(item for item in STOPPED_BY.values() if str(stop).startswith(item))
    return by, EXIT_TERMINATED if stop.exit_code == EXIT_REQUEUE else stop.exit_code


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(f"{STOPPED_BY[signal.Signals(number)]}.")
