"""Counts of samples that are being drawn, for the line that says what a silent run waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl.rollout.threads import Call


class SamplesInFlight:
    """Samples that are not finished, and calls of environments that run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._done = 0
        self._calls: set[Call] = set()

    def begin(self, samples: int) -> None:
        """Count samples that are about to be drawn, and forget those of finished batches."""
        if self._begun == self._done:
            self._begun = self._done = 0
        self._begun += samples

    def end(self, samples: int) -> None:
        """Count samples that are finished, with any outcome."""
        self._done += samples

    @contextmanager
    def in_environment(self, call: Call) -> Iterator[None]:
        """Context of one call of an environment, which counts from when it begins to run."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def __str__(self) -> str:
        """`3 of 128 samples, 2 calls of environments, the oldest for 12 s`; empty while nothing is drawn."""
        left, calls = self._begun - self._done, [call.begun for call in self._calls if call.begun is not None]
        if not left:
            return ""
        oldest = f"{self._clock() - min(calls):.0f} s" if calls else ""
        inside = f"{len(calls)} call{'s' if len(calls) > 1 else ''} of environments, the oldest for {oldest}"
        return f"{left} of {self._begun} samples, " + (inside if calls else "all of them in the engines")
