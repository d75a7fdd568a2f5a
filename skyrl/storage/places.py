"""Finds the storage at an address: a path, or the URL of an object store such as `s3://bucket/folder`; and a file there
as libraries read it that take a path or an open file.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from skyrl.storage.disk import Disk, Storage

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
    folder, _, name = location.rpartition("/")
    return cast(BinaryIO, io.BufferedReader(RemoteFile(storage_at(folder), name), READ_AHEAD))


class RemoteFile(io.RawIOBase):
    """An object of a store, read in ranges."""

    def __init__(self, storage: Storage, name: str) -> None:
        """Raises `OSError` if there is no such object. So does reading, once the object has been replaced."""
        self._storage, self._name = storage, name
        self._size, self._version, self._position = storage.size(name), storage.version(name), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # whatever is written to
        count = max(min(len(buffer), self._size - self._position), 0)
        content = self._storage.read(self._name, self._position, count)
        if self._storage.version(self._name) != self._version:
            raise OSError(f"{self._name} was replaced while it was read")
        buffer[:count] = content
        self._position += count
        return count
