"""Advice on a file that the operating system does not let a run read or write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""Errors of a folder that was removed, renamed or unmounted while it was in use."""

FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
OPEN_FILES = frozenset({errno.EMFILE, errno.ENFILE})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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
