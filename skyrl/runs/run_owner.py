"""The process that holds a run's folder, by the files `.lock` and `.owner` in it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from skyrl.tree.files import stored_text

LOCK, _OWNER = ".lock", ".owner"
_UNKNOWN = "its owner cannot be read"


def sign(folder: Path) -> None:
    """Write which process this is to `.owner`. The text outlives the lock, and is read only while the lock is held."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")  # unlike datetime's, it takes any TZ
    text = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
    (folder / _OWNER).write_text(text, encoding="utf-8")


def unsign(folder: Path) -> None:
    """Remove the text of `sign`; the caller holds the lock."""
    with suppress(OSError):
        (folder / _OWNER).unlink()


def in_use_message(folder: Path, field: str) -> str:
    """The message about a folder that another run holds; `field` names the folder in the configuration."""
    return f"{folder} is in use by another run ({owner(folder)}): wait for its end, or choose another {field}"


def owner(folder: Path) -> str:
    """The process that holds a folder, as `sign` wrote it."""
    try:
        return stored_text(folder / _OWNER) or _UNKNOWN
    except OSError:
        return _UNKNOWN


def is_locked(folder: Path) -> bool:
    """Whether a run holds the folder now. Nothing is created, and a free lock is released at once."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
