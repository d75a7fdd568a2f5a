"""The metrics of a run as series of numbers, read from `metrics.jsonl` while the run writes it."""

from __future__ import annotations

from array import array
from itertools import islice
from math import isfinite
from pathlib import Path
from threading import Lock

from attrs import field, frozen

from skyrl.storage.json_files import GrowingLines

MOST_POINTS = 20_000
"""Largest number of points kept of a series. A longer one keeps every second point, and so on."""

MOST_LINES = 500
"""Largest number of lines that one look reads, so that no page waits long for the lock."""


@frozen(eq=False)
class Series:
    """The finite values of one metric, and their steps."""

    steps: array[int] = field(factory=lambda: array("q"))
    values: array[float] = field(factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, value: float) -> None:
        """Append a point, in the order of steps."""
        self.steps.append(step)
        self.values.append(value)
        if len(self) > MOST_POINTS:
            del self.steps[1:-1:2], self.values[1:-1:2]

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal."""
        return all(value == self.values[0] for value in self.values)

    def thinned(self, most: int) -> tuple[list[int], list[float]]:
        """At most about `most` points: the first, the last, and the mean of as many in a row as is needed between."""
        width = -(-len(self) // most)
        if width < 2:
            return list(self.steps), list(self.values)
        places = range(0, len(self), width)
        means = [sum(part) / len(part) for part in (self.values[place : place + width] for place in places)]
        return [self.steps[place] for place in places] + [self.steps[-1]], [*means, self.values[-1]]


class RunMetrics:
    """The series of one run by name. Who reads them while another thread may `look` holds `lock`."""

    def __init__(self, folder: Path) -> None:
        self._lines = GrowingLines(folder / "metrics.jsonl")
        self.lock = Lock()
        self.series: dict[str, Series] = {}
        self.lines = 0
        """Number of lines that were read."""

        self.last_step = 0

    def look(self) -> int:
        """Read up to `MOST_LINES` more lines, from the first again if the run went back to a checkpoint. Returns their
        number; 0 if all complete lines are read.
        """
        with self.lock:
            if self._lines.is_replaced:
                self.series, self.lines = {}, 0
            before = self.lines
            for line in islice(self._lines.new(), MOST_LINES):
                self.lines, self.last_step = self.lines + 1, line["step"]
                for name, value in line.items():
                    if name != "step" and isinstance(value, int | float) and _is_finite(value):
                        self.series.setdefault(name, Series()).add(line["step"], float(value))
            return self.lines - before

    def last(self, name: str) -> float | None:
        """The last value of a metric; None if there is none."""
        return self.series[name].values[-1] if name in self.series else None

    def total(self, name: str) -> float:
        """Sum of a metric over all steps; 0 if there is none."""
        return sum(self.series[name].values) if name in self.series else 0.0


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False
