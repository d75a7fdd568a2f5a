"""Log-probabilities of a reference, computed once for all rows of a data set and stored as one file of float32."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from skyrl.data.answer_pairs import LabelledRow, PairRow, RankedRow
from skyrl.data.rows_on_access import RowsOnAccess
from skyrl.errors import DataError

_TYPE = np.dtype("<f4")

R = TypeVar("R", PairRow, RankedRow, LabelledRow)


class ReferencedRows(RowsOnAccess[R]):
    """Rows with the stored log-probabilities of their answers, each read on access."""

    def __init__(self, rows: Sequence[R], file: Path) -> None:
        """`file` is one that `store_logprobs` wrote for these rows. Raises `DataError` for any other."""
        self._rows: Sequence[R] = rows
        self._ends = np.cumsum([row.answer_tokens for row in rows])
        try:
            self._logprobs = np.memmap(file, _TYPE, "r")
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read ({error}): delete it, and it is computed again") from error
        if len(self._logprobs) != self._ends[-1]:
            raise DataError(f"{file} is damaged: delete it, and it is computed again")

    def __len__(self) -> int:
        return len(self._rows)

    def read_row(self, index: int) -> R:
        start = int(self._ends[index - 1]) if index else 0
        logprobs = np.array(self._logprobs[start : int(self._ends[index])], dtype=np.float32)
        row: R = self._rows[index]
        return attrs.evolve(row, ref_logprobs=logprobs)


def logprobs_file(folder: Path, fingerprint: str, reference: Iterable[object]) -> Path:
    """The file for rows with this fingerprint and a reference with these marks, such as digests of its weights."""
    key = sha256(repr((fingerprint, *reference)).encode()).hexdigest()[:32]
    return folder / f"{key}.f32"


def is_stored(file: Path) -> bool:
    """Whether an earlier session, or another run, has stored the log-probabilities."""
    return file.exists()


def store_logprobs(file: Path, logprobs: Sequence[NDArray[np.float32]]) -> None:
    """Write the log-probabilities of all rows, whole or not at all. Raises `DataError` if they cannot be written."""
    scratch = file.with_suffix(f".{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.concatenate(logprobs).astype(_TYPE).tofile(scratch)
        scratch.replace(file)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise DataError(f"log-probabilities of the reference cannot be stored in {file.parent}: {error}") from error
