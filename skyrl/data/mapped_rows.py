"""Rows that are tokens already, trained on where they lie: no copy of them is in memory, and none is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from skyrl.chats.masks import Mask
from skyrl.data.arrow_files import ArrowTable
from skyrl.data.row_forms import MASKS, UNLEARNED
from skyrl.data.row_store import RowsOnAccess
from skyrl.data.stored_distributions import IDS, LOGPROBS
from skyrl.data.tokenized_rows import ID, SupervisedRow

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("input_ids", "labels", *MASKS, IDS, LOGPROBS)
"""Columns of a row that is tokens."""

ReadRow = Callable[[dict[str, Any], str], SupervisedRow]
"""A row of a table, and its id, as tokens."""


class MappedRows(RowsOnAccess[SupervisedRow]):
    """Rows of Arrow tables, each read on access. Only their places are in memory: 8 bytes per row."""

    def __init__(self, tables: Sequence[ArrowTable], indices: Sequence[NDArray[np.int64]], read: ReadRow) -> None:
        """`indices` are those of the rows that are used in each table; `read` makes a row of what is there."""
        self._tables, self._places, self._read = list(tables), list(indices), read
        self._ends = np.cumsum([len(part) for part in indices])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read_row(self, index: int) -> SupervisedRow:
        number = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[number - 1]) if number else 0
        inside = int(self._places[number][index - start])
        return self._read(row_of_tokens(self._tables[number], inside), f"{number}:{inside}")


def row_of_tokens(table: ArrowTable, index: int) -> dict[str, Any]:
    """The columns of one row that hold tokens and masks."""
    return table.row(index, tuple(name for name in COLUMNS if name in table.columns))


@frozen(eq=False)
class TokenBatch:
    """Rows of a batch end to end, each of which can be trained on."""

    ids: NDArray[np.integer[Any]]
    learned: Mask
    ends: NDArray[np.int64]
    """End of each row in `ids` and `learned`."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each row in tokens."""
        return np.diff(self.ends, prepend=0)

    def rows_as_bytes(self) -> Iterator[bytes]:
        """Each row as `SupervisedRow.to_bytes` gives it."""
        ids, mask = self.ids.astype(ID).tobytes(), self.learned.tobytes()
        size = ID.itemsize
        for start, end in pairwise([0, *self.ends.tolist()]):
            yield ids[size * start : size * end] + mask[start:end]


def tokens_of(batch: pa.RecordBatch, vocabulary: int) -> TokenBatch | None:
    """All rows of a batch, checked together as `tokenized_row` checks each; None if one of them is bad, or of types
    that are to be looked at row by row.
    """
    names = [name for name in COLUMNS if name in batch.schema.names]
    lists = [(name, flat) for name in names if (flat := _flat(batch.column(name))) is not None]
    columns = {name: values for name, (values, _) in lists}
    ends = lists[0][1][1] if lists else np.empty(0, np.int64)
    if len(lists) < len(names) or "input_ids" not in columns or any((item != ends).any() for _, (_, item) in lists):
        return None
    ids = columns["input_ids"]
    if not len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        return None
    learned = np.ones(len(ids), np.bool_)
    if "labels" in columns:
        learned = columns["labels"] != UNLEARNED
        if (columns["labels"][learned] != ids[learned]).any():
            return None
    for name in MASKS:
        if (mask := columns.get(name)) is not None:
            if not ((mask == 0) | (mask == 1)).all():
                return None
            learned &= mask.astype(np.bool_)
    if "attention_mask" in columns:
        attended = columns["attention_mask"].astype(np.bool_)
        before = np.concatenate([[0], np.cumsum(attended, dtype=np.int64)])
        ids, learned, ends = ids[attended], learned[attended], before[ends]
    starts = np.concatenate([[0], ends[:-1]])
    if (starts == ends).any():
        return None
    learned[starts] = False  # nothing predicts the first token
    return TokenBatch(ids, learned, ends) if np.logical_or.reduceat(learned, starts).all() else None


def _flat(column: pa.Array) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """The values of all lists of a column, and where each list ends in them; None if these are not whole numbers."""
    import pyarrow as pa

    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        return None
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    if values.null_count or not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        return None
    return values.to_numpy(zero_copy_only=False), offsets[1:] - offsets[0]
