"""What sandboxes of this process have left running."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_EARLIER: set[int] = set()


def a_test_begins() -> None:
    """What runs now is another test's, such as the warm interpreters that environments share and keep."""
    _EARLIER.clear()
    _EARLIER.update(child.pid for child in psutil.Process().children(recursive=True))


def left_over(patience: float = 60.0) -> list[psutil.Process]:
    """Processes below a fork server of this process, or that have lost theirs, once `patience` seconds have passed."""
    deadline = time.monotonic() + patience
    while (processes := _found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes


def process_beside(file: str) -> psutil.Process | None:
    """The process that works in a folder with this file in it, in whatever sandbox: the program has come so far."""
    pids = [pid for pid in psutil.pids() if os.path.exists(Path("/proc", str(pid), "cwd", file))]
    return psutil.Process(pids[0]) if pids else None


def _found() -> list[psutil.Process]:
    current = psutil.Process()
    below = _alive(current.children(recursive=True))
    servers = {child.pid for child, parent, _ in below if parent == current.pid}
    servers |= {child.pid for child, parent, _ in below if parent in servers and _is_bubblewrap(parent)}
    orphans = [child for child, parent, line in _alive(psutil.process_iter()) if parent == 1 and "fork_server" in line]
    known = servers | _EARLIER
    return [child for child, _, line in below if "fork_server" in line and child.pid not in known] + orphans


def _alive(processes: Iterable[psutil.Process]) -> list[tuple[psutil.Process, int, str]]:
    """Each with its parent and its command line."""
    alive = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append((process, process.ppid(), " ".join(process.cmdline())))
        except psutil.NoSuchProcess:
            continue
    return alive


def _is_bubblewrap(pid: int) -> bool:
    try:
        return "bwrap" in psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return False
