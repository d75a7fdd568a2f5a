"""Layouts for the tests, and ways to look for what a run has left."""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from skyrl.planning.layout import Layout, Pool, RankPlacement
from skyrl.processes.orphans import folder_of_this_process


def layout(**ranks: int) -> Layout:
    """One machine, one slot for each rank of each role."""
    names = [(role, rank) for role, count in ranks.items() for rank in range(count)]
    placements = [
        RankPlacement(role=role, rank=rank, pool="all", gpus=(slot,)) for slot, (role, rank) in enumerate(names)
    ]
    return Layout(pools=(Pool(name="all", nodes=1, gpus_per_node=len(placements)),), placements=tuple(placements))


def lives(pid: int) -> bool:
    """Whether there is such a process, and not just its entry in the table.

    Asked of a descriptor and not of /proc, where a look at a process that is just ending has hung in the kernel.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([process], [], [], 0)[0]
    finally:
        os.close(process)


def family(pid: int) -> list[int]:
    """Every process that this one started, directly or not."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def own_folder() -> Path:
    """The private folder of the cluster that this process has started."""
    return folder_of_this_process(Path(tempfile.gettempdir()))


def soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits until the condition holds; false where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
