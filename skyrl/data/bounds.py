"""How large a source of rows may become in memory: a few hundred kilobytes can unpack to all that a machine has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

DEEPEST = 64
"""Objects and lists inside each other in a row."""

LONGEST_LINE = 256 << 20
"""Bytes of a line of a JSONL file."""

FREE_BYTES = 256 << 20
"""To which a file may expand, however small it is."""

LARGEST_RATIO = 500
"""Bytes in memory for each byte of a larger file."""


def is_too_deep(value: object) -> bool:
    """Are more than `DEEPEST` objects and lists inside each other?"""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: object) -> list[Any]:
    """The objects and lists directly inside."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]


class Expansion:
    """Counts what a compressed file becomes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = FREE_BYTES + LARGEST_RATIO * path.stat().st_size

    def take(self, size: int) -> None:
        """Raises `DataError` if it is more than the file may become."""
        self._left -= size
        if self._left < 0:
            raise DataError(
                f"{self._path} expands to more than {LARGEST_RATIO} times its size: it repeats one value, or was made "
                "to fill the memory. Write it again as JSONL, or uncompressed and without a dictionary"
            )


def bytes_of(batch: pa.RecordBatch) -> int:
    """Bytes of a batch whose texts are written out, where the file has them once in a dictionary."""
    import pyarrow as pa

    columns = (each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in batch.columns)
    return sum(column.nbytes for column in columns)
