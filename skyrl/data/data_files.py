"""Files of a source: one, those that match a pattern, or those of a folder of an object store."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import BinaryIO, cast

from attrs import frozen

from skyrl.config.foundation.reasoning_tasks import SCHEME
from skyrl.errors import DataError, UserError
from skyrl.storage.places import is_address, opened, storage_at

FILES = (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".csv", ".json")
"""Suffixes of sources that are files."""

_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
"""First bytes of a compressed file -> the end of its name."""


@frozen
class DataFile:
    """A file of rows, on a disk or in an object store."""

    location: str
    """Its path or address."""

    @property
    def suffix(self) -> str:
        """The end of its name, which says how it is read; without that of a compression."""
        path = Path(self.location)
        return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix

    @property
    def path(self) -> Path | None:
        """Its path; None in an object store."""
        return None if is_address(self.location) else Path(self.location)

    def size(self) -> int:
        """Its size in bytes. Raises `DataError`."""
        try:
            folder, _, name = self.location.rpartition("/")
            return Path(self.location).stat().st_size if self.path else storage_at(folder).size(name)
        except (OSError, UserError) as error:
            raise DataError(f"{self.location} cannot be read: {error}") from error

    def open(self) -> BinaryIO:
        """The file, open for reading. Raises `DataError`."""
        try:
            return opened(self.location)
        except (OSError, UserError) as error:
            raise DataError(f"{self.location} cannot be read: {error}") from error

    def lines(self) -> BinaryIO:
        """The uncompressed file, open for reading. Raises `DataError`, also for a compressed one whose name does not
        say so.
        """
        import pyarrow as pa

        file = cast(io.BufferedReader, self.open())
        if (form := _COMPRESSED.get(Path(self.location).suffix)) is not None:
            return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(file, form)))
        beginning = file.peek(4)
        if end := next((end for magic, end in _MAGIC.items() if beginning.startswith(magic)), ""):
            file.close()
            raise DataError(f"{self.location} is compressed: rename it to {self.location}{end}, or decompress it")
        return cast(BinaryIO, file)


def is_remote(source: str) -> bool:
    """Whether a source is in an object store."""
    return is_address(source) and not source.startswith(SCHEME)


def has_files(source: str) -> bool:
    """Whether a source is a file, a pattern of files, or in an object store; others are datasets and tasks."""
    return is_remote(source) or (not is_address(source) and (source.endswith(FILES) or "*" in source))


def data_files(source: str) -> tuple[DataFile, ...]:
    """The files of such a source, in the order of their names. Raises `DataError` if there is none.

    A pattern has `*` and `?` for any characters, and on a disk `**` for any folders.
    """
    paths = _remote(source) if is_remote(source) else _local(source)
    if not paths:
        hint = f"; files of rows end in {', '.join(FILES)}" if "*" in source or is_remote(source) else ""
        raise DataError(f"there is no data file {(source if hint else str(Path(source).expanduser()))[:500]}{hint}")
    return tuple(map(DataFile, paths))


def _local(source: str) -> Sequence[str]:
    path = str(Path(source).expanduser())
    if "*" in source:
        return sorted(item for item in glob(path, recursive=True) if item.endswith(FILES) and Path(item).is_file())
    try:
        return [path] if Path(path).is_file() else []
    except OSError as error:  # a name of thousands of letters
        raise DataError(f"there is no data file {path[:500]}: {error.strerror}") from error


def _remote(source: str) -> Sequence[str]:
    folder, _, last = source.rstrip("/").rpartition("/")
    if last.endswith(FILES) and "*" not in last:
        return [source]
    where, pattern = (folder, last) if "*" in last else (source.rstrip("/"), "*")
    try:
        names = [name for name in storage_at(where).names() if name.endswith(FILES) and fnmatchcase(name, pattern)]
    except (OSError, UserError) as error:
        raise DataError(f"{source} cannot be listed: {error}") from error
    return [f"{where}/{name}" for name in names]


def versions_of(source: str) -> Iterator[tuple[str, int, str]]:
    """Place, size in bytes and version of each file of a source: what changes when a file does."""
    for file in data_files(source):
        if file.path is not None:
            yield str(file.path.absolute()), file.size(), str(file.path.stat().st_mtime_ns)
        else:
            folder, _, name = file.location.rpartition("/")
            facts = storage_at(folder).facts(name)
            yield file.location, facts.size, facts.version
