"""Storage of checkpoints and weights: a few operations on files, whatever their content.

`Disk` is a local or shared folder; `skyrl.storage.bucket` is an object store, with an address such as
`s3://bucket/folder`; `storage_at` finds either. Names are relative, with `/`. Errors are `OSError`. A storage can be
pickled: every rank writes its own files through it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import xxhash
from attrs import frozen

Bytes = bytes | bytearray | memoryview

CHUNK = 1 << 20
"""Number of bytes read and digested at a time, which fits a core's cache."""


class Storage(Protocol):
    """A folder of files."""

    @property
    def where(self) -> str:
        """Address of the folder, for messages."""

    @property
    def moves(self) -> bool:
        """Whether a folder can be moved atomically. If so, the move makes a checkpoint visible; otherwise its manifest
        does.
        """

    def names(self, folder: str = "") -> list[str]:
        """Names directly in a folder, sorted; empty if the folder does not exist."""

    def size(self, name: str) -> int:
        """Size of a file in bytes."""

    def version(self, name: str) -> str:
        """A text that changes when the file does."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        """`length` bytes of a file from byte `start`, or all of the bytes from there."""

    def chunks(self, name: str) -> Iterator[Bytes]:
        """All of a file, chunk by chunk. A chunk is valid until the next one is requested."""

    def write(self, name: str, content: Sequence[Bytes]) -> None:
        """Write a whole file, creating its folders; it is durable when this returns."""

    def move(self, folder: str, to: str) -> None:
        """Rename a folder, durably. `to` must not exist."""

    def remove(self, name: str) -> None:
        """Delete a file, or a folder and everything in it; does nothing if it does not exist."""

    def flush(self, folder: str) -> None:
        """Make the names in a folder durable."""

    def room(self) -> int | None:
        """Free space in bytes; None if it is unknown."""


@frozen
class Disk:
    """A folder of a file system. It need not exist yet."""

    path: Path

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def moves(self) -> bool:
        return True

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def version(self, name: str) -> str:
        return str((self.path / name).stat().st_mtime_ns)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        with (self.path / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size - start if length is None else length
            content = bytearray(max(size, 0))
            file.seek(start)
            filled = 0
            while filled < len(content):
                count = file.readinto(memoryview(content)[filled:])
                if not count:
                    raise OSError(f"{self.path / name} ends before byte {start + size}")
                filled += count
            return content

    def chunks(self, name: str) -> Iterator[Bytes]:
        buffer = bytearray(CHUNK)
        view = memoryview(buffer)
        with (self.path / name).open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield view[:count]

    def write(self, name: str, content: Sequence[Bytes]) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for chunk in content:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def move(self, folder: str, to: str) -> None:
        (self.path / folder).rename(self.path / to)
        self.flush("")

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def flush(self, folder: str) -> None:
        flush(self.path / folder)

    def room(self) -> int | None:
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        return shutil.disk_usage(existing).free


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(content: Iterable[Bytes]) -> str:
    """xxh3-128 of all chunks in order, as 32 hexadecimal digits. It detects corruption and truncation, not forgery."""
    digest = xxhash.xxh3_128()
    for chunk in content:
        digest.update(chunk)
    return digest.hexdigest()
