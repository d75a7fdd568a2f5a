"""Counts of samples that are being drawn, for the line that says what a silent run waits for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SamplesInFlight:
    """Samples that are not finished, and calls of environments that run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._numbers = clock, itertools.count()
        self._begun = self._done = 0
        self._calls: dict[int, float] = {}

    def begin(self, samples: int) -> None:
        """Count samples that are to be drawn; those of batches that are finished are forgotten."""
        if self._begun == self._done:
            self._begun = self._done = 0
        self._begun += samples

    def end(self, samples: int) -> None:
        """Count samples that are finished, with any outcome."""
        self._done += samples

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Around one call of an environment."""
        number = next(self._numbers)
        self._calls[number] = self._clock()
        try:
            yield
        finally:
            del self._calls[number]

    def __str__(self) -> str:
        """`3 of 128 samples, 2 calls of environments, the oldest for 12 s`; empty while nothing is drawn."""
        left, calls = self._begun - self._done, list(self._calls.values())
        if not left:
            return ""
        oldest = f"{self._clock() - min(calls):.0f} s" if calls else ""
        inside = f"{len(calls)} call{'s' if len(calls) > 1 else ''} of environments, the oldest for {oldest}"
        return f"{left} of {self._begun} samples, " + (inside if calls else "all of them in the engines")
