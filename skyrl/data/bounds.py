"""Limits on the size of rows in memory: a file of a few hundred kilobytes can expand to fill a machine's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

DEEPEST = 64
"""Largest nesting depth of objects and lists in a row."""

LONGEST_LINE = 256 << 20
"""Largest number of bytes of a line of a JSONL file."""

FREE_BYTES = 256 << 20
"""Number of bytes to which any file may expand, however small it is."""

LARGEST_RATIO = 500
"""Additional bytes in memory that are allowed for each byte of a file."""

ELEMENT_BYTES = 16
"""Bytes that every value in memory takes at least, with its place in a list or under a name."""


def is_too_deep(value: object, levels: int = DEEPEST) -> bool:
    """Whether objects and lists inside a value are nested more than `levels` deep."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    children = (child for child in inside if isinstance(child, dict | list))
    return any(levels == 0 or is_too_deep(child, levels - 1) for child in children)


class Expansion:
    """Counts the bytes to which a compressed file expands."""

    def __init__(self, location: str, size: int) -> None:
        """`location` is its path or address, `size` its number of bytes."""
        self._path = location
        self._left = FREE_BYTES + LARGEST_RATIO * size

    def take(self, size: int) -> None:
        """Count `size` more bytes. Raises `DataError` if the file has expanded to more than it may."""
        self._left -= size
        if self._left < 0:
            raise DataError(
                f"{self._path} expands to more than {LARGEST_RATIO} times its size: it repeats one value, or was made "
                "to fill the memory. Write it again as JSONL, or uncompressed and without a dictionary"
            )


def size_of(batch: pa.RecordBatch) -> int:
    """Bytes of a batch as Python objects, at least: those of its columns with dictionaries decoded, and those of the
    objects themselves, which nulls, booleans, empty lists and empty structs need although they have few or no bytes.
    """
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns
    ]
    return sum(column.nbytes + ELEMENT_BYTES * _elements(column) for column in columns)


def _elements(column: pa.Array) -> int:
    """Number of values of a column, in lists and structs at any depth, each list and struct included; also those below
    a null, if the file has any.
    """
    import pyarrow as pa

    kind = column.type
    if pa.types.is_struct(kind):
        inside = [column.field(index) for index in range(kind.num_fields)]
    elif pa.types.is_fixed_size_list(kind):
        inside = [column.values.slice(column.offset * kind.list_size, len(column) * kind.list_size)]
    elif pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        parts = (column.keys, column.items) if pa.types.is_map(kind) else (column.values,)
        inside = [part.slice(first, last - first) for part in parts]
    else:
        inside = []
    return len(column) + sum(map(_elements, inside))
