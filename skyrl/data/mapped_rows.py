"""Rows that are tokens already, trained on where they lie: no copy of them is in memory, and none is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl.data.arrow_files import ArrowTable
from skyrl.data.row_forms import MASKS
from skyrl.data.rows_on_access import RowsOnAccess
from skyrl.data.stored_distributions import IDS, LOGPROBS
from skyrl.data.tokenized_rows import SupervisedRow

COLUMNS = ("input_ids", "labels", *MASKS, IDS, LOGPROBS)
"""Columns of a row that is tokens."""

ReadRow = Callable[[dict[str, Any], str], SupervisedRow]
"""A row of a table, and its id, as tokens."""


class MappedRows(RowsOnAccess[SupervisedRow]):
    """Rows of Arrow tables, each read on access. Only their places are in memory: 8 bytes per row."""

    def __init__(self, tables: Sequence[ArrowTable], places: Sequence[NDArray[np.int64]], read: ReadRow) -> None:
        """`places` are those of the rows that are used in each table; `read` makes a row of what is there."""
        self._tables, self._places, self._read = list(tables), list(places), read
        self._ends = np.cumsum([len(each) for each in places])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read_row(self, place: int) -> SupervisedRow:
        number = int(np.searchsorted(self._ends, place, side="right"))
        start = int(self._ends[number - 1]) if number else 0
        inside = int(self._places[number][place - start])
        return self._read(row_of_tokens(self._tables[number], inside), f"{number}:{inside}")


def row_of_tokens(table: ArrowTable, place: int) -> dict[str, Any]:
    """The columns of one row that hold tokens and masks."""
    return table.row(place, tuple(name for name in COLUMNS if name in table.columns))


def rows_of_tokens(table: ArrowTable) -> Iterator[dict[str, Any]]:
    """The same of every row, in order."""
    return (row_of_tokens(table, place) for place in range(len(table)))
