"""The folder in which a program runs: a place in memory in namespaces, otherwise a new folder on disk."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from skyrl.sandbox.fork_client import ForkClient
from skyrl.sandbox.tiers import Tier, has_namespaces


def folder_of(client: ForkClient, tier: Tier) -> str:
    """Path of a process's own folder: in namespaces a mount point for memory, otherwise a new folder on disk, which
    `remove_folder` removes.
    """
    return client.folder if has_namespaces(tier) else tempfile.mkdtemp(dir=client.folder)


def remove_folder(folder: str, tier: Tier) -> None:
    """Remove the folder that `folder_of` returned, if it is on disk."""
    if not has_namespaces(tier):
        remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder, however deep a program nested it and whatever rights it left; links are not followed.

    Other processes, even of other users, may still move what is inside. So every step goes by an open descriptor: what
    lies in a folder is moved up into the top one, and no way back up is ever looked for. Neither the stack, nor the
    number of open files, nor the length of a path grows with the depth. What cannot be removed is left.
    """
    with suppress(OSError):
        with _opened(folder) as top:
            waiting = _without_files(top)
            while waiting:
                waiting += _removed(waiting.pop(), top)
        os.rmdir(folder)


def _removed(name: str, top: int) -> list[str]:
    """Remove a folder in `top`. Returns the new names, in `top`, of the folders that were inside."""
    moved = []
    with suppress(OSError):
        with _opened(name, top) as at:
            for below in _without_files(at):
                new = secrets.token_hex(8)
                with suppress(OSError):
                    os.rename(below, new, src_dir_fd=at, dst_dir_fd=top)
                    moved.append(new)
        os.rmdir(name, dir_fd=top)
    return moved


def _without_files(folder: int) -> list[str]:
    """Remove everything but the folders inside, and return their names. They can then be moved and opened."""
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in entries:
        with suppress(OSError):
            if is_folder:
                with _opened(name, folder):
                    pass
            else:
                os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in entries if is_folder]


@contextmanager
def _opened(name: str, inside: int | None = None) -> Iterator[int]:
    """Descriptor of a folder, never of one that a link leads to, that its owner has all rights to."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
    try:
        place = f"/proc/self/fd/{found}"
        os.chmod(place, 0o700)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(found)
    try:
        yield folder
    finally:
        os.close(folder)
