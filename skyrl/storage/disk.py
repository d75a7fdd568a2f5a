"""Storage of checkpoints and weights: a few operations on files, whatever their content.

`Disk` is a local or shared folder; `skyrl.storage.bucket` is an object store, with an address such as
`s3://bucket/folder`; `storage_at` finds either. Names are relative, with `/`. Errors are `OSError`. A storage can be
pickled: every rank writes its own files through it. `remedy` has advice on what an operating system refuses.
"""

from __future__ import annotations

import errno
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

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""Errors of a folder that was removed, renamed or unmounted while it was in use."""

FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
OPEN_FILES = frozenset({errno.EMFILE, errno.ENFILE})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@frozen
class FileFacts:
    """Size and version of a file, known without reading it."""

    size: int
    """Its size in bytes."""

    version: str
    """A text that changes when the file does."""


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

    def facts(self, name: str) -> FileFacts:
        """Size and version of a file."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        """`length` bytes of a file from byte `start`, or all of the bytes from there."""

    def chunks(self, name: str, size: int | None = None) -> Iterator[Bytes]:
        """All of a file, chunk by chunk. A chunk is valid until the next one is requested. `size` is the file's size in
        bytes if it is known, which saves a request to an object store.
        """

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

    def facts(self, name: str) -> FileFacts:
        status = (self.path / name).stat()
        return FileFacts(status.st_size, str(status.st_mtime_ns))

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

    def chunks(self, name: str, size: int | None = None) -> Iterator[Bytes]:
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
        return shutil.disk_usage(nearest(self.path)).free


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


def remedy(number: int | None, folder: Path | None) -> str:
    """Advice on an error of the operating system, by its `errno`, as the end of a sentence.

    `folder` is on the disk that failed, and tells inodes that have run out from bytes.
    """
    if number in GONE:
        return "it was removed, renamed or unmounted while the run used it: bring it back"
    if number in FORBIDDEN:
        return "make the folder writable again"
    if number in OPEN_FILES:
        return "raise the number of files that may be open (ulimit -n)"
    if number == errno.EFBIG:
        return "raise the largest size that a file may have (ulimit -f, or the limit of the file system)"
    if number == errno.ENOSPC and folder is not None and not has_inodes(folder):
        return "the disk has no inodes left: delete files, whatever their size"
    if number in FULL:
        return "free some space"
    return "see whether the disk, or the server that holds it, works"


def has_inodes(folder: Path) -> bool:
    """Whether the disk of the folder can hold a further file; True if the file system does not count inodes."""
    try:
        disk = os.statvfs(nearest(folder))
    except OSError:
        return True
    return disk.f_files == 0 or disk.f_favail > 0


def nearest(folder: Path) -> Path:
    """The folder itself, or the first above it that exists."""
    return next(item for item in (folder, *folder.parents) if item.exists())


def readable(size: int) -> str:
    """Formats a number of bytes in a suitable decimal unit: 1.5 GB."""
    value, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
