"""Identifies processes, and kills orphans: every process of a run carries a mark in its environment, and processes with
the mark of an owner that is gone are killed.

Children inherit the mark, in any session and under any parent, so that an engine's own subprocesses are found too.
`start_reaper` starts this very file as a small program that waits for the owner's end, whatever its cause. If the
reaper could not clean up (the machine went down, or the reaper was killed too), `sweep` does so at the next start.
Imports only the standard library, so that the reaper starts in milliseconds. Needs Linux, for /proc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

RUN = "SKYRL_RUN"
"""The mark of all processes that a private cluster started; its value is the name of the cluster's folder."""

HOST = "SKYRL_HOST"
"""The mark of all processes that one actor started; its value names the run, the role and the rank."""

PRIVATE = "SKYRL_PRIVATE"
"""The variable with the folder of a private cluster, for its processes: files there do not outlive the cluster."""

_PREFIX = "skyrl-ray-"
_LOCK = "lock"
_LONGEST_ROOT = 12
_PATIENCE = 10.0
_GLANCE = 0.2


def private_root(temporary: str) -> Path:
    """The folder that private folders are made in: the one for temporary files, or /tmp if its path is so long that
    those of Ray's sockets would exceed the 107 bytes that Linux allows.
    """
    return Path(temporary if len(temporary) <= _LONGEST_ROOT else "/tmp")


def process_id(pid: int) -> str:
    """`PID:START` of a process, with its start time in kernel ticks, which distinguishes it from a later process with
    the same pid. The start time is `gone` if there is no such process.
    """
    return f"{pid}:{_start_time(pid)}"


def lives(process: str) -> bool:
    """Whether the process with this `process_id` lives on this machine; a zombie does not."""
    pid, _, start = process.partition(":")
    return pid.isdigit() and _alive(int(pid)) and _start_time(int(pid)) == start


def folder_of_this_process(root: Path) -> Path:
    """The private folder that the running process owns below `root`: its name holds the process id and start time."""
    pid = os.getpid()
    return root / f"{_PREFIX}{pid}-{_start_time(pid)}"


def make_private_folder(root: Path) -> tuple[Path, int]:
    """Make the folder of `folder_of_this_process`. It stays locked, and so is not swept, until the descriptor is closed
    or its owner ends.

    The folder gets its name once it is locked. The lock works across containers that share the folder `root`, in which
    process ids differ.
    """
    folder = folder_of_this_process(root)
    unnamed = root / f".{folder.name}"
    unnamed.mkdir(mode=0o700)
    lock = os.open(unnamed / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unnamed.rename(folder)
    return folder, lock


def start_reaper(variable: str, value: str, folder: Path | None = None) -> subprocess.Popen[bytes]:
    """Start the program that waits for the end of the calling process, then kills all processes with the mark
    `variable=value` and removes the folder. It runs in a separate session, so that Ctrl-C does not reach it.
    """
    arguments = [sys.executable, "-I", "-S", __file__, str(os.getpid()), variable, value, str(folder or "")]
    environment = {name: text for name, text in os.environ.items() if name not in {RUN, HOST}}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        arguments, env=environment, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/"
    )


def kill_tagged(variable: str, value: str, folder: Path | None = None) -> list[int]:
    """Kill all processes that `tagged` finds until it finds none; returns those that remain after ten seconds.

    Resource trackers of Python's multiprocessing go last: once the processes that they serve are gone, they remove the
    shared memory and semaphores of these from /dev/shm, and end by themselves. They are killed after five seconds.
    """
    deadline = time.monotonic() + _PATIENCE
    while remaining := tagged(variable, value, folder):
        spared = {pid for pid in remaining if _is_resource_tracker(pid) and time.monotonic() < deadline - _PATIENCE / 2}
        for pid in set(remaining) - spared:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return remaining


def tagged(variable: str, value: str, folder: Path | None = None) -> list[int]:
    """Processes of this user that carry the mark or write to a file in the folder, and their descendants.

    A process that gives itself a title may write it over its environment; Ray's agents do, and keep their logs open.
    """
    mark = f"{variable}={value}".encode()
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for pid in _pids():
        try:
            parents[pid] = int(_status(pid)[1])
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") or _has_open(pid, folder):
                pids.add(pid)
        except OSError:
            continue  # it is gone, or another user's
    pids.discard(os.getpid())
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return sorted(pid for pid in pids if pid != os.getpid() and _alive(pid))


def sweep(root: Path) -> list[Path]:
    """Remove the processes, sockets and folders below `root` whose owners are gone. Returns the folders.

    An owner is gone if no process holds the lock in its folder.
    """
    swept = []
    for folder in root.glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with open(folder / _LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError where it is held
                kill_tagged(RUN, folder.name, folder)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
    return swept


def keep(owner: int, variable: str, value: str, folder: str) -> None:
    """Wait for the end of the parent process `owner`, then kill all processes with the mark and remove the folder."""
    while os.getppid() == owner:
        time.sleep(_GLANCE)
    kill_tagged(variable, value, Path(folder) if folder else None)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: state, parent and so on. Raises OSError if the process is gone."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _has_open(pid: int, folder: Path | None) -> bool:
    """Whether the process has a file in the folder open for writing. Raises OSError if that cannot be determined."""
    if folder is None:
        return False
    links = [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    inside = [link for link in links if os.readlink(link).startswith(f"{folder}/")]
    return any(os.lstat(link).st_mode & stat.S_IWUSR for link in inside)


def _alive(pid: int) -> bool:
    try:
        return _status(pid)[0] not in {"Z", "X"}
    except OSError:
        return False


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _start_time(pid: int) -> str:
    """Start time of the process, in ticks since boot. Together with its id, it identifies the process."""
    try:
        return _status(pid)[19]
    except OSError:
        return "gone"


if __name__ == "__main__":
    keep(int(sys.argv[1]), *sys.argv[2:5])
