"""Folders at a known place, which another user of the machine may have made first."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


def make_own_folder(folder: Path, mode: int = 0o755) -> None:
    """Make a folder, and those on the way to it, unless it exists.

    Raises PermissionError if it exists and its owner, who may replace every file in it, is neither this user nor root.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    refuse_a_strangers(folder)


def refuse_a_strangers(folder: Path) -> None:
    """Raise PermissionError if a folder's owner is neither this user nor root; FileNotFoundError if it does not exist.

    A shared disk may give all files of this user, or of root, another owner: a file made there shows which.
    """
    owner = folder.stat().st_uid
    if owner in (os.geteuid(), 0):
        return
    scratch = folder / f".{secrets.token_hex(8)}"
    os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        if scratch.stat().st_uid != owner:
            reason = f"it belongs to the user with id {owner}, who may replace what is in it: name a folder of your own"
            raise PermissionError(errno.EPERM, reason, str(folder))
    finally:
        scratch.unlink()
