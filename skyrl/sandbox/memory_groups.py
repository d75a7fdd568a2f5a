"""Control groups that limit the memory of all processes of a program together, if this process may create some.

A group is reused for one program after another, because the kernel keeps removed groups as long as pages of theirs are
left. Each group is locked while its owner lives, so that groups of a killed run are found and removed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

from attrs import frozen

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "skyrl-sandbox-"
_LIMITS = (
    # the limit, and one of swap, for version 1 (memory, both together) and version 2 (none)
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", None),
    ("memory.max", "memory.swap.max", 0),
)
_MOST_LEFT_OVER = 1 << 20
"""Bytes of files in memory with which a group is used again: much less than any program needs."""


@frozen
class MemoryGroup:
    """One group. Supervisors get its descriptor, which locks it."""

    folder: Path
    descriptor: int

    def limit(self, number: int) -> None:
        """Set the limit in bytes. Raises OSError if more is in use, or the kernel has no such limit."""
        for name, swap, most in _LIMITS:
            if (self.folder / name).exists():
                with suppress(OSError):  # lower first: swap may not be limited to less than memory
                    (self.folder / swap).write_text("-1" if most is None else str(most))
                (self.folder / name).write_text(str(number))
                if most is None:
                    with suppress(OSError):  # a kernel that does not count swap
                        (self.folder / swap).write_text(str(number))
                return
        raise OSError(f"{self.folder} has no limit of memory")

    def left_over(self) -> int:
        """Bytes of files in memory, such as those in /dev/shm, that earlier processes of the group have left."""
        with suppress(OSError), open(self.folder / "memory.stat", encoding="ascii") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("shmem "))
        return 0

    def remove(self) -> None:
        """Remove the group, which must not have processes."""
        os.close(self.descriptor)
        with suppress(OSError):
            self.folder.rmdir()


class MemoryGroups:
    """The groups of one process for the programs of one fork server. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock, self._owner = Lock(), os.getpid()
        self._free: list[MemoryGroup] = []

    def take(self, limit: int) -> MemoryGroup | None:
        """A free group with this limit in bytes; None if this process may not create one."""
        while True:
            with self._lock:
                if self._owner != os.getpid():  # those of the process that this one was forked from
                    self._free, self._owner = [], os.getpid()
                group = self._free.pop() if self._free else _create_group()
            if group is None:
                return None
            if group.left_over() > _MOST_LEFT_OVER:  # the next program would be killed for it
                group.remove()
                continue
            try:
                group.limit(limit)
            except OSError:
                group.remove()
                if not group.folder.exists():
                    return None
            else:
                return group

    def give_back(self, group: MemoryGroup | None) -> None:
        """Return a group whose program has ended completely."""
        if group is not None:
            with self._lock:
                self._free.append(group)

    def close(self) -> None:
        """Remove the groups that are free."""
        with self._lock:
            while self._free and self._owner == os.getpid():
                self._free.pop().remove()


def sweep() -> None:
    """Remove groups whose owner is gone."""
    for parent in _parents():
        for folder in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                descriptor = _locked(folder)
                os.close(descriptor)
                folder.rmdir()


def _create_group() -> MemoryGroup | None:
    for parent in _parents():
        for number in range(1000):
            folder = parent / f"{_PREFIX}{os.getpid()}-{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            except OSError:
                break
            with suppress(OSError):
                return MemoryGroup(folder, _locked(folder))
    return None


def _locked(folder: Path) -> int:
    """A descriptor of the folder that holds its lock. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _parents() -> Iterator[Path]:
    """Groups below which a group with a memory limit can be created: this process's own, or the root group."""
    with suppress(OSError), open("/proc/self/cgroup", encoding="ascii") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            root = _ROOT / "memory" if "memory" in controllers.split(",") else _ROOT
            if root == _ROOT and controllers:
                continue
            for folder in (root / path.lstrip("/"), root):
                if root != _ROOT or "memory" in _enabled_below(folder):
                    yield folder


def _enabled_below(folder: Path) -> list[str]:
    """Controllers that the children of a group of version 2 have."""
    with suppress(OSError):
        return (folder / "cgroup.subtree_control").read_text().split()
    return []
