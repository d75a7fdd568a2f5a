"""The metrics of a run as series of numbers, read from `metrics.jsonl` while the run writes it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import compress, groupby, islice
from math import nan
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from attrs import define, field, frozen

from skyrl.storage.json_files import GrowingLines

MOST_POINTS = 4_000
"""Largest number of points kept of a series. A longer one becomes one of half as many, each of two, and so on."""

MOST_LINES = 500
"""Largest number of lines that one look reads, so that no page waits long for the lock."""

_NUMBERS = {bool, float, int}


@frozen(kw_only=True)
class Thinned:
    """Points of a curve, each of the steps from its own to the next."""

    steps: list[int]
    means: list[float]
    lows: list[float]
    highs: list[float]


@define(eq=False)
class Series:
    """The finite values of one metric, and their steps. A point of a long series is the mean, the least and the largest
    of several values.
    """

    steps: array[int] = field(factory=lambda: array("q"))
    values: array[float] = field(factory=lambda: array("d"))
    lows: array[float] = field(factory=lambda: array("d"))
    highs: array[float] = field(factory=lambda: array("d"))
    count: int = 0
    """Number of values."""

    total: float = 0.0
    """Sum of all values."""

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, steps: Sequence[int], values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Append points, in the order of steps."""
        self.steps.extend(steps)
        for own in (self.values, self.lows, self.highs):
            own.frombytes(values.tobytes())
        self.count, self.total = self.count + len(values), self.total + float(values.sum())
        while len(self) > MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        """Make one point of two, except the first and the last: the end of a series stays exact."""
        most = (len(self) - 2) // 2 * 2
        pairs = slice(1, 1 + most, 2), slice(2, 2 + most, 2)
        steps = np.array(self.steps)
        self.steps = array("q", [steps[0], *steps[pairs[0]], *steps[1 + most :]])
        for name, join in (("values", lambda a, b: (a + b) / 2), ("lows", np.minimum), ("highs", np.maximum)):
            own = np.array(getattr(self, name))
            joined = np.concatenate((own[:1], join(own[pairs[0]], own[pairs[1]]), own[1 + most :]))
            setattr(self, name, array("d", joined.tobytes()))

    @property
    def mean(self) -> float:
        """Mean of all values."""
        return self.total / self.count

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal."""
        return min(self.lows) == max(self.highs)

    def thinned(self, most: int) -> Thinned:
        """At most `most` points, for equal numbers of steps, and the last one."""
        steps, values, lows, highs = map(np.array, (self.steps, self.values, self.lows, self.highs))
        if len(self) > most:
            pixels = (steps[:-1] - steps[0]) * most // max(1, steps[-1] - steps[0])
            firsts = np.append(np.flatnonzero(np.diff(pixels, prepend=-1)), len(self) - 1)
            steps, lows, highs = steps[firsts], np.minimum.reduceat(lows, firsts), np.maximum.reduceat(highs, firsts)
            values = np.add.reduceat(values, firsts) / np.diff(firsts, append=len(self))
        return Thinned(steps=steps.tolist(), means=values.tolist(), lows=lows.tolist(), highs=highs.tolist())


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
            for names, alike in groupby(islice(self._lines.new(), MOST_LINES), key=tuple):
                lines = list(alike)
                self._add([name for name in names if name != "step"], lines)
                self.lines, self.last_step = self.lines + len(lines), lines[-1]["step"]
            return self.lines - before

    def _add(self, names: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines that have the same metrics, by columns."""
        steps = [line["step"] for line in lines]
        numbers = np.array([[_number(line[name]) for name in names] for line in lines], dtype=np.float64)
        for name, column, is_finite in zip(names, numbers.T, np.isfinite(numbers).T, strict=True):
            if is_finite.any():
                own = steps if is_finite.all() else list(compress(steps, is_finite))
                self.series.setdefault(name, Series()).add(own, column[is_finite])

    def last(self, name: str) -> float | None:
        """The last value of a metric; None if there is none."""
        return self.series[name].values[-1] if name in self.series else None

    def total(self, name: str) -> float:
        """Sum of a metric over all steps; 0 if there is none."""
        return self.series[name].total if name in self.series else 0.0


def _number(value: object) -> float:
    """The value as a float; NaN for what is no number, or a whole number that no float holds."""
    if type(value) not in _NUMBERS:
        return nan
    try:
        return float(value)  # type: ignore[arg-type]  # one of `_NUMBERS`
    except OverflowError:
        return nan
