"""Memory of all processes of a program together, for a supervisor to watch. Imports the standard library alone."""

import os
from contextlib import suppress

from skyrl.sandbox import confinement

_PAGE = os.sysconf("SC_PAGE_SIZE")


def is_over(limit: int) -> bool:
    """Whether the processes that descend from this one use more than `limit` bytes.

    Resident pages are counted first, which counts shared pages once for each process. If that exceeds the limit, each
    page is divided by the number of its users; a process that hides its pages is still counted in full.
    """
    processes = _program_ids()
    if sum(map(_resident, processes)) <= limit:
        return False
    return sum(map(_share, processes)) > limit


def join(group: int) -> None:
    """Put this process, and all that it starts, into the control group of this descriptor."""
    procs = os.open("cgroup.procs", os.O_WRONLY, dir_fd=group)
    try:
        os.write(procs, b"0")
    finally:
        os.close(procs)


def kills_in(group: int | None) -> int:
    """Number of processes of the control group that the kernel has killed for its limit; 0 without a group."""
    for name in ("memory.events", "memory.oom_control") if group is not None else ():
        with suppress(OSError), open(os.open(name, os.O_RDONLY, dir_fd=group), encoding="ascii") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _program_ids() -> list[int]:
    """Process ids of the program. In namespaces, /proc shows only the program, without this process."""
    if os.path.exists("/proc/self/stat"):
        return confinement.descendants(os.getpid())
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _resident(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _share(pid: int) -> int:
    with suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss:", "SwapPss:")))
    return _resident(pid)
