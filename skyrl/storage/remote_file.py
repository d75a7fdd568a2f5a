"""A file of any storage as Python reads files: what libraries that take an open file need."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, cast

from skyrl.storage.disk import Storage
from skyrl.storage.places import is_address, storage_at

READ_AHEAD = 4 << 20
"""Number of bytes that one request to an object store asks for, at least."""


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
