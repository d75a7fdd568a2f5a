"""The folder in which a program runs: a place in memory in namespaces, otherwise a new folder on disk."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

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

    Neither the stack, nor the number of open files, nor the length of a path grows with the depth. Files that the file
    system refuses to remove are left.
    """
    with suppress(OSError):
        _empty(folder)
        os.rmdir(folder)


def _empty(folder: str) -> None:
    """Remove everything inside the folder, depth first, with one folder open at a time."""
    at = _opened(folder)
    try:
        names: list[str] = []
        inside = [_without_files(at)]
        while names or inside[-1]:
            if inside[-1]:
                names.append(inside[-1].pop())
                at = _moved(at, names[-1])
                inside.append(_without_files(at))
            else:
                at = _moved(at, "..")
                os.rmdir(names.pop(), dir_fd=at)
                inside.pop()
    finally:
        os.close(at)


def _without_files(folder: int) -> list[str]:
    """Remove everything but the folders inside, and return their names."""
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in entries:
        if is_folder:
            os.chmod(name, 0o700, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in entries if is_folder]


def _moved(at: int, name: str) -> int:
    there = _opened(name, at)
    os.close(at)
    return there


def _opened(name: str, folder: int | None = None) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
