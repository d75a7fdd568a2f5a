"""Removes folders in which programs ran, whatever they left there."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_log = logging.getLogger(__name__)


def remove_tree(folder: str) -> None:
    """Remove a folder, however deep a program nested it and whatever rights it left; links are not followed.

    Other processes, even of other users, may still move what is inside. So every step goes by an open descriptor: what
    lies in a folder is moved up into the top one, and no way back up is ever looked for. Neither the stack, nor the
    number of open files, nor the length of a path grows with the depth. What cannot be removed is left, and so is a
    folder of another owner, which a program may have moved here: root could empty it where the program cannot.
    """
    try:
        with _opened(folder) as top:
            owner = os.fstat(top).st_uid
            waiting = _remove_files(top, owner)
            while waiting:
                waiting += _removed(waiting.pop(), top, owner)
        os.rmdir(folder)
    except OSError as error:
        if error.errno != errno.ENOENT:
            _log.warning(
                "the folder %s of a sandboxed program was not removed (%s): look for folders of other users inside, "
                "which a program may have moved there",
                folder,
                error.strerror,
            )


def _removed(name: str, top: int, owner: int) -> list[str]:
    """Remove a folder in `top`. Returns the new names, in `top`, of the folders that were inside."""
    moved = []
    with suppress(OSError):
        with _opened(name, top, owner) as at:
            for below in _remove_files(at, owner):
                new = secrets.token_hex(8)
                with suppress(OSError):
                    os.rename(below, new, src_dir_fd=at, dst_dir_fd=top)
                    moved.append(new)
        os.rmdir(name, dir_fd=top)
    return moved


def _remove_files(folder: int, owner: int) -> list[str]:
    """Remove everything but the folders inside, and return the names of those that are the owner's. They can then be
    moved and opened.
    """
    with os.scandir(folder) as listing:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing]
    folders = []
    for name, is_folder in entries:
        with suppress(OSError):
            if is_folder:
                with _opened(name, folder, owner):
                    folders.append(name)
            else:
                os.unlink(name, dir_fd=folder)
    return folders


@contextmanager
def _opened(name: str, inside: int | None = None, owner: int | None = None) -> Iterator[int]:
    """Descriptor of a folder, never of one that a link leads to, that its owner has all rights to. Raises
    PermissionError if it has another owner than the one that is given.
    """
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
    try:
        if owner not in (None, os.fstat(handle).st_uid):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)
        path = f"/proc/self/fd/{handle}"
        os.chmod(path, 0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(handle)
    try:
        yield folder
    finally:
        os.close(folder)
