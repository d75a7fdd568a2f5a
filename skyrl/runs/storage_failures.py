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
from skyrl.storage.failures import FULL, OPEN_FILES, nearest, readable, remedy

_OF_A_DISK = FULL | OPEN_FILES | {errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT}
"""Errors that no mistake in a program causes, whichever file they are about."""


def storage_error(error: OSError | SafetensorError, folders: Sequence[Path]) -> StorageError | None:
    """The exception to raise; None if no disk is at fault. `folders` are those that the run writes into.

    Any error about a file in one of the folders counts: their content is the run's own.
    """
    number, name = _number(error), getattr(error, "filename", None)
    folder = next((each for each in folders if name and Path(os.fsdecode(name)).is_relative_to(each)), None)
    if number not in _OF_A_DISK and folder is None:
        return None
    where = f"{os.fsdecode(name)}: " if name else ""
    free = ", ".join(
        f"{readable(shutil.disk_usage(nearest(folder)).free)} are free in {folder}" for folder in dict.fromkeys(folders)
    )
    advice = remedy(number, folder or next(iter(folders), None))
    return StorageError(
        f"A file of the run cannot be read or written: {where}{os.strerror(number or 0)}; {free}. What was saved "
        f"before is whole: {advice}, and the same command continues from the last checkpoint"
    )


def _number(error: OSError | SafetensorError) -> int | None:
    """The errno; safetensors has it in its text: `I/O error: No space left on device (os error 28)`."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None
