"""A disk that is full or broken, told in a sentence: a run's files are on several, perhaps."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

from skyrl.errors import StorageError

_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}


def storage_error(error: OSError, folders: Sequence[Path]) -> StorageError | None:
    """What to raise for it; None where it is no disk's fault. `folders` are those that the run writes into."""
    if error.errno not in _STORAGE:
        return None
    where = f"{error.filename}: " if error.filename else ""
    free = ", ".join(f"{_free(folder):,} bytes are free in {folder}" for folder in dict.fromkeys(folders))
    return StorageError(
        f"A file of the run cannot be written: {where}{error.strerror}; {free}. What was saved before is whole: make "
        "room, and the same command goes on from the last checkpoint"
    )


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free
