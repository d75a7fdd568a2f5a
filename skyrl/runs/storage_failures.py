"""Turns a full or failing disk into a `StorageError` that names the folders and their free space."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from skyrl.errors import StorageError

_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}


def storage_error(error: OSError | SafetensorError, folders: Sequence[Path]) -> StorageError | None:
    """The exception to raise; None if no disk is at fault. `folders` are those that the run writes into."""
    number, name = _number(error), getattr(error, "filename", None)
    if number not in _STORAGE:
        return None
    where = f"{name}: " if name else ""
    free = ", ".join(f"{_free(folder):,} bytes are free in {folder}" for folder in dict.fromkeys(folders))
    return StorageError(
        f"A file of the run cannot be written: {where}{os.strerror(number)}; {free}. What was saved before is whole: "
        "free some space, and the same command continues from the last checkpoint"
    )


def _number(error: OSError | SafetensorError) -> int | None:
    """The errno; safetensors has it in its text: `I/O error: No space left on device (os error 28)`."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free
