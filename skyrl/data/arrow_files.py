"""Arrow files, mapped into memory: a row is read when it is asked for, so that tables may be larger than memory.

Supported are `.arrow` files (IPC streams, as Hugging Face's library writes, and IPC files) and folders of its
`save_to_disk`.
"""

from __future__ import annotations

import bisect
import json
import mmap
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl.data.bounds import Expansion, size_of
from skyrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PAGES = 16 << 20
"""Number of bytes that rows read from a file keep in memory before its pages are given back to the system."""

AROUND = 64 << 10
"""Number of bytes that Linux maps around each place that is read, if they are in its cache (fault_around_bytes)."""


class ArrowTable:
    """The rows of one or several Arrow files, of which only the places of batches are in memory."""

    def __init__(self, files: list[Path]) -> None:
        """Raises `DataError` for a file that is not an Arrow file."""
        self._files = [_MappedFile(file) for file in files]
        self._batches = [(file, batch) for file in self._files for batch in file.batches]
        self._ends = list(accumulate(batch.num_rows for _, batch in self._batches))
        self.columns: tuple[str, ...] = tuple(self._batches[0][1].schema.names) if self._batches else ()
        """Names of the columns."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int, columns: tuple[str, ...]) -> dict[str, Any]:
        """The row at this index: of a list, its values as a numpy array. `columns` are the names to read."""
        number = bisect.bisect_right(self._ends, index)
        file, batch = self._batches[number]
        inside = index - (self._ends[number - 1] if number else 0)
        values = {name: _value(batch.column(name)[inside]) for name in columns}
        file.count(sum(AROUND + value.nbytes for value in values.values() if isinstance(value, np.ndarray)))
        return values

    def slices(self, count: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All rows in order, at most `count` at a time, after the place of the first of them."""
        offset = 0
        for file, batch in self._batches:
            for begin in range(0, batch.num_rows, count):
                part = batch.slice(begin, count)
                yield offset + begin, part
                file.count(AROUND + part.nbytes)
            offset += batch.num_rows

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows in order, as Python objects."""
        for file, batch in self._batches:
            expansion = Expansion(str(file.path), file.path.stat().st_size)
            expansion.take(size_of(batch))
            file.count(batch.nbytes)
            yield from batch.to_pylist()


def arrow_table(source: str) -> ArrowTable | None:
    """The table at a path; None if it is no Arrow file and no folder of Arrow files, or a folder whose rows were
    selected or reordered, which Hugging Face's library reads. Raises `DataError`.
    """
    path = Path(source).expanduser()
    if path.suffix == ".arrow" and path.is_file():
        return ArrowTable([path])
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("_indices_files"):
            return None
        return ArrowTable([path / item["filename"] for item in state["_data_files"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _MappedFile:
    """One file, whose pages are given back after `PAGES` bytes have been read."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path, self._read = path, 0
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            buffer = pa.py_buffer(self._map)
            is_file = self._map[:6] == b"ARROW1"
            reader = pa.ipc.open_file(buffer) if is_file else pa.ipc.open_stream(buffer)
            self.batches = []
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                batch.validate(full=True)  # lists of a damaged file may end outside of it
                self.batches.append(batch)
                self.count(AROUND + batch.nbytes)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as an Arrow file: {error}") from error

    def count(self, size: int) -> None:
        """Count bytes that were read."""
        self._read += size
        if self._read > PAGES:
            self._read = 0
            self._map.madvise(mmap.MADV_DONTNEED)


def _value(value: pa.Scalar) -> object:
    """An entry of a column: of a list, its values as a numpy array, where possible without a copy."""
    import pyarrow as pa

    is_list = value.is_valid and isinstance(value, pa.ListScalar)
    return value.values.to_numpy(zero_copy_only=False) if is_list else value.as_py()
