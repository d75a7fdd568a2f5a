"""Digests of files of any size in bounded time: small ones are read whole, the rest in blocks spread over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

from skyrl.storage.disk import digest_of

BUDGET = 1 << 30
"""Number of bytes that are read of all files of a call together."""

BLOCK = 1 << 20
"""Number of bytes of a block, in a file that is not read whole."""


def file_digests(files: Iterable[Path]) -> dict[Path, str]:
    """xxh3-128 of each file that can be read: of its size, and of its content up to an equal share of `BUDGET`.

    A larger file is read in evenly spaced blocks, its first and its last among them. So another file of the same size
    is found if any of these blocks differs, as all of them do when a model was trained.
    """
    there = {file: file.stat() for file in files if file.is_file()}
    share = max(BLOCK, BUDGET // max(1, len(there)))
    digests = {}
    for file, status in there.items():
        try:
            digests[file] = _digest(file, status.st_size, share, (status.st_mtime_ns, status.st_ino))
        except OSError:  # whoever reads it for its content says why
            continue
    return digests


@cache
def _digest(file: Path, size: int, share: int, version: tuple[int, int]) -> str:
    """`version` is the file's time of change and its inode: unchanged files are read once per process."""
    return digest_of(chain([size.to_bytes(8, "little")], _blocks(file, size, share)))


def _blocks(file: Path, size: int, share: int) -> Iterator[bytes]:
    count = -(-min(size, share) // BLOCK)
    with file.open("rb", buffering=0) as opened:
        for number in range(count):
            if size > share:
                opened.seek(number * (size - BLOCK) // (count - 1) if count > 1 else 0)
            yield opened.read(BLOCK)
