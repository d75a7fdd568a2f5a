"""Reports what a long wait is for, so that a silent run can be distinguished from one that hangs.

waiting for: generate (for 10 s); 3 of 128 samples, 3 in their environments, the oldest for 9 s
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from skyrl.processes.progress import Progress, Wait, wait_texts

AFTER = 10.0
"""Seconds after which a wait is reported."""

_SHOWN = 4
"""Number of waits that one line names."""

_WHOLE = "step"
"""A wait that encloses others, which are more specific."""


class WaitReporter:
    """Reports each wait once, after `after` seconds, and after at least twice the longest earlier wait of its kind: a
    run whose steps take a minute each does not report every step.
    """

    def __init__(self, progress: Progress, report: Callable[[str], None], *, after: float = AFTER) -> None:
        """`report` is called with one line, in the watching thread."""
        self._progress, self._report, self._after = progress, report, after
        self._longest: dict[str, float] = {}
        self._seen: dict[int, Wait] = {}  # open at the last look
        self._reported: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="skyrl-waits", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Report the open waits, if one of them has to be reported now."""
        waits = [wait for wait in self._progress.open_waits() if wait.target != _WHOLE]
        self._remember_the_ended({wait.number: wait for wait in waits})
        new = [wait for wait in waits if wait.number not in self._reported]
        if not any(wait.seconds >= self._patience(wait.target) for wait in new):
            return
        self._reported |= {wait.number for wait in waits}
        texts, details = wait_texts(waits), self._progress.details()
        more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        self._report("waiting for: " + "; ".join([*texts[:_SHOWN], *more, *([details] if details else [])]))

    def _remember_the_ended(self, waits: dict[int, Wait]) -> None:
        for number in self._seen.keys() - waits.keys():
            ended = self._seen[number]
            self._longest[ended.target] = max(ended.seconds, self._longest.get(ended.target, 0.0))
            self._reported.discard(number)
        self._seen = waits

    def _patience(self, target: str) -> float:
        return max(self._after, 2 * self._longest.get(target, 0.0))

    def _watch(self) -> None:
        while not self._ended.wait(self._after / 10):
            self.look()
