"""The metrics of a run as series of numbers, read from `metrics.jsonl` while the run writes it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import groupby, islice
from math import nan
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
from attrs import define, field, frozen
from pyarrow.json import ReadOptions, read_json

from skyrl.storage.json_files import LARGEST_STEP, GrowingLines, record_of

MOST_POINTS = 4_000
"""Largest number of points kept of a series. A longer one becomes one of half as many, each of two, and so on."""

MOST_LINES = 2_000
"""Largest number of lines that one look reads, so that no page waits long for the lock."""

_NUMBERS = {bool, float, int}
_TYPES = {pa.bool_(), pa.float64(), pa.int64()}

Steps = np.ndarray[Any, np.dtype[np.int64]]
Values = np.ndarray[Any, np.dtype[np.float64]]


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

    def add(self, steps: Steps, values: Values) -> None:
        """Append points, in the order of steps."""
        self.steps.frombytes(steps.tobytes())
        for own in (self.values, self.lows, self.highs):
            own.frombytes(values.tobytes())
        self.count, self.total = self.count + len(values), self.total + float(values.sum())
        while len(self) > MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        """Make one point of two, except the first and the last: the end of a series stays exact."""
        most = (len(self) - 2) // 2 * 2
        pairs = slice(1, 1 + most, 2), slice(2, 2 + most, 2)
        joins: dict[str, Callable[[Any, Any], Any]] = {
            "steps": lambda a, b: a,
            "values": lambda a, b: (a + b) / 2,
            "lows": np.minimum,
            "highs": np.maximum,
        }
        for name, join in joins.items():
            stored = getattr(self, name)
            own = np.frombuffer(stored, stored.typecode)
            joined = np.concatenate((own[:1], join(own[pairs[0]], own[pairs[1]]), own[1 + most :]))
            setattr(self, name, array(stored.typecode, joined.tobytes()))

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
            lines = list(islice(self._lines.new_lines(), MOST_LINES))
            for steps, columns in _parsed(lines):
                for name, column in columns.items():
                    is_finite = np.isfinite(column)
                    if is_finite.any():
                        self.series.setdefault(name, Series()).add(steps[is_finite], column[is_finite])
                self.lines, self.last_step = self.lines + len(steps), int(steps[-1])
            return len(lines)

    def last(self, name: str) -> float | None:
        """The last value of a metric; None if there is none."""
        return self.series[name].values[-1] if name in self.series else None

    def total(self, name: str) -> float:
        """Sum of a metric over all steps; 0 if there is none."""
        return self.series[name].total if name in self.series else 0.0


Columns = tuple[Steps, Mapping[str, Values]]
"""Steps of consecutive lines of `metrics.jsonl`, and by metric a value for each; NaN for what is no number, or missing.
"""


def _parsed(lines: Sequence[bytes]) -> Iterator[Columns]:
    """The lines in columns. Arrow parses all lines at once, in a fifth of the time; where it cannot, as where one line
    is damaged or a metric is no number in some, they are parsed one by one.
    """
    if not lines:
        return
    columns = _parsed_by_arrow(lines)
    if columns is not None:
        yield columns
        return
    records = (record for line in lines if (record := record_of(line)) is not None)
    for names, group in groupby(records, key=tuple):
        alike = list(group)
        values = {name: np.array([_number(line[name]) for line in alike]) for name in names if name != "step"}
        yield np.array([line["step"] for line in alike]), values


def _parsed_by_arrow(lines: Sequence[bytes]) -> Columns | None:
    """The lines in columns; None if they are not all records of steps, or a metric has values of several types."""
    block = b"".join(lines)
    options = ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        table = read_json(BytesIO(block), read_options=options)
        columns = dict(zip(table.column_names, table.columns, strict=True))
        step = columns.pop("step")
    except (ValueError, KeyError, pa.ArrowException):
        return None
    if len(step) != len(lines) or not pa.types.is_int64(step.type) or step.null_count:
        return None
    steps = _to_numpy(step)
    if steps.min() < 0 or steps.max() >= LARGEST_STEP:
        return None
    return steps, {name: _numbers(own) for name, own in columns.items() if own.type in _TYPES}


def _numbers(column: pa.ChunkedArray) -> Values:
    """The values as floats, NaN where there is none."""
    values = np.full(len(column), nan)
    is_there = _to_numpy(column.is_valid().cast(pa.uint8())) == 1
    values[is_there] = _to_numpy(column.drop_null().cast(pa.float64(), safe=False))
    return values


def _to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """The values of a column without gaps. `to_numpy` would import pandas, which takes 38 MB."""
    return np.from_dlpack(column.combine_chunks())


def _number(value: object) -> float:
    """The value as a float; NaN for what is no number, or a whole number that no float holds."""
    if type(value) not in _NUMBERS:
        return nan
    try:
        return float(value)  # type: ignore[arg-type]  # one of `_NUMBERS`
    except OverflowError:
        return nan
