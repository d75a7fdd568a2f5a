"""Next-token distributions of a teacher, stored with tokenized rows: their parquet form, written and read.

    input_ids           the tokens of a prompt and its answer
    loss_mask           1 for each token of the answer, 0 for the others
    teacher_ids         for each token of the answer, the ids of the k tokens that the teacher finds likeliest there
    teacher_logprobs    their log-probabilities in nats, at temperature 1 and over the whole vocabulary

Tokenized rows of any other origin may have the last two columns as well: one list for each learned token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from skyrl.chats.contents import short
from skyrl.data.sources import Row
from skyrl.data.tokenized_rows import LikelyTokens
from skyrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"

_ABOVE_ONE = 1e-2
"""Excess of the sum of probabilities over 1 that is accepted, for engines that compute in 16 bits."""


def stored_distributions(row: Row, learned: int, vocabulary: int, *, at_most: int | None) -> LikelyTokens:
    """The teacher's tokens that a row stores for its `learned` tokens, cut to the `at_most` likeliest at each. Raises
    `DataError` for columns that are missing or inconsistent.
    """
    if row.get("input_ids") is None or row.get(IDS) is None or row.get(LOGPROBS) is None:
        raise DataError(
            f"distillation.stored needs tokenized rows with input_ids, {IDS} and {LOGPROBS}, as skyrl generate "
            f"--top-logprobs writes them; the columns are {', '.join(map(str, row))}"
        )
    ids, logprobs = _table(row[IDS], IDS, "iu"), _table(row[LOGPROBS], LOGPROBS, "fiu").astype(np.float32)
    if ids.shape != logprobs.shape or len(ids) != learned:
        raise DataError(
            f"{learned} tokens are learned, {IDS} has {_size(ids)}, and {LOGPROBS} has {_size(logprobs)}: each has a "
            "list of the same length for each learned token"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise DataError(f"{IDS} go from {ids.min()} to {ids.max()}, and the tokenizer has 0 to {vocabulary - 1}")
    total = np.exp(logprobs.astype(np.float64)).sum(-1).max()
    if not np.isfinite(logprobs).all() or total > 1 + _ABOVE_ONE:
        raise DataError(
            f"{LOGPROBS} are no log-probabilities in nats: the probabilities of one place add up to {total:.4g}"
        )
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :at_most]
    return LikelyTokens(ids=np.take_along_axis(ids, best, -1), logprobs=np.take_along_axis(logprobs, best, -1))


def _table(values: object, name: str, kinds: str) -> NDArray[Any]:
    """The value as a table of numbers. Raises `DataError` for anything else."""
    try:
        result = np.array([list(value) for value in values])  # type: ignore[attr-defined]  # what has no items is refused below
    except (TypeError, ValueError):  # no lists, or lists of different lengths
        result = np.empty(0)
    if result.ndim != 2 or not result.size or result.dtype.kind not in kinds:
        raise DataError(f"{name} is {short(values)}, not a list of equally long lists of numbers")
    return result.astype(np.int64) if result.dtype.kind in "iu" else result


def _size(table: NDArray[Any]) -> str:
    return f"{table.shape[0]} lists of {table.shape[1]}"


class DistributionsFile:
    """A parquet file of rows, written in parts."""

    def __init__(self, path: Path) -> None:
        """The file is made with the first rows."""
        self._path = path
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, rows: Sequence[dict[str, object]]) -> None:
        """Append rows with the columns of the form, `prompt_id` and `sample`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        ids, numbers = pa.list_(pa.int32()), pa.list_(pa.list_(pa.float32()))
        types = {"prompt_id": pa.string(), "sample": pa.int32(), "input_ids": ids, "loss_mask": pa.list_(pa.int8())}
        schema = pa.schema({**types, IDS: pa.list_(ids), LOGPROBS: numbers})
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, schema)
        self._writer.write_table(pa.Table.from_pylist(list(rows), schema))
