"""Finds the storage at an address: a path, or the URL of an object store such as `s3://bucket/folder`; and a file there
as libraries read it that take a path or an open file.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from skyrl.storage.disk import Disk, Storage

if TYPE_CHECKING:
    from skyrl.storage.bucket import Bucket  # which imports fsspec

READ_AHEAD = 4 << 20
"""Number of bytes that one request to an object store asks for, at least."""


def is_address(where: str | Path) -> bool:
    """Whether this is an address of an object store."""
    return "://" in str(where)


def storage_at(where: str | Path) -> Storage:
    """Storage of a folder, which need not exist yet. Using a storage with an unknown protocol raises `UserError`."""
    if not is_address(where):
        return Disk(Path(where).expanduser().absolute())
    from skyrl.storage.bucket import Bucket

    return Bucket(str(where).rstrip("/"))


@contextmanager
def here(where: str | Path, name: str) -> Iterator[Path]:
    """Local path of a file in a folder. A file in an object store is copied, and the copy is deleted afterwards."""
    if not is_address(where):
        yield Path(where) / name
        return
    with tempfile.NamedTemporaryFile() as copy:
        for chunk in storage_at(where).chunks(name):
            copy.write(chunk)
        copy.flush()
        yield Path(copy.name)


def opened(location: str) -> BinaryIO:
    """The file at a path or an address, open for reading. Raises `OSError`."""
    if not is_address(location):
        return Path(location).open("rb")
    from skyrl.storage.bucket import Bucket

    folder, _, name = location.rpartition("/")
    return cast(BinaryIO, io.BufferedReader(RemoteFile(Bucket(folder), name), READ_AHEAD))


class RemoteFile(io.RawIOBase):
    """An object of a store, read in ranges: with one request for what is known of it, and one for each range."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        """Raises `OSError` if there is no such object. So does reading, once the object has been replaced."""
        self._bucket, self._name = bucket, name
        self._facts, self._position = bucket.facts(name), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._facts.size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # whatever is written to
        content = self._read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        """The rest, in one range: the method of the base class reads 8 KiB at a time."""
        return self._read(self._facts.size)

    def _read(self, most: int) -> bytes:
        count = min(most, self._facts.size - self._position)
        if count <= 0:
            return b""
        content, facts = self._bucket.part(self._name, self._position, self._position + count)
        if facts != self._facts:
            raise OSError(f"{self._name} was replaced while it was read")
        self._position += count
        return content
