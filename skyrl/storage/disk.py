"""Where checkpoints and weights lie: a few operations on files, and nothing that knows what is in them.

`Disk` is a folder of this machine or one that all machines share; `skyrl.storage.bucket` is an object store. Names
are relative, with `/`. Errors are `OSError`. A storage can be pickled: every rank writes its own files through it.
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
"""Bytes that are read and digested at a time: they stay in a core's cache."""


class Storage(Protocol):
    """A folder of files."""

    @property
    def where(self) -> str:
        """Address in messages."""

    @property
    def moves(self) -> bool:
        """Can a folder be moved in one instant? Then that makes a checkpoint visible; else its manifest does."""

    def names(self, folder: str = "") -> list[str]:
        """Names directly in a folder, sorted; empty where there is no folder."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        """A part of a file, or all of it."""

    def chunks(self, name: str) -> Iterator[Bytes]:
        """All of a file, piece by piece. A piece holds until the next is asked for."""

    def write(self, name: str, content: Sequence[Bytes]) -> None:
        """A whole file, with its folders; it is durable when this returns."""

    def move(self, folder: str, to: str) -> None:
        """Give a folder another name, durably. `to` does not exist."""

    def remove(self, name: str) -> None:
        """Delete a file, or a folder and everything in it; does nothing where there is none."""

    def flush(self, folder: str) -> None:
        """The names in a folder are durable when this returns."""

    def room(self) -> int | None:
        """Free bytes; None where that is unknown."""


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

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        with (self.path / name).open("rb", buffering=0) as file:
            wanted = os.fstat(file.fileno()).st_size - start if length is None else length
            content = bytearray(max(wanted, 0))
            file.seek(start)
            filled = 0
            while filled < len(content):
                count = file.readinto(memoryview(content)[filled:])
                if not count:
                    raise OSError(f"{self.path / name} ends before byte {start + wanted}")
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
        descriptor = os.open(self.path / folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def room(self) -> int | None:
        there = next(path for path in (self.path, *self.path.parents) if path.exists())
        return shutil.disk_usage(there).free


def digest_of(content: Iterable[Bytes]) -> str:
    """xxh3-128 of everything in order, 32 hexadecimal digits. It finds rot and truncation, not forgery."""
    digest = xxhash.xxh3_128()
    for chunk in content:
        digest.update(chunk)
    return digest.hexdigest()
