"""Names of processes of this machine that no later process gets, and whether they live. Needs Linux, for /proc."""

from __future__ import annotations

from pathlib import Path


def process_id(pid: int) -> str:
    """`PID:START` of a process, with its start time in kernel ticks, which distinguishes it from a later process with
    the same pid. The start time is empty if there is no such process.
    """
    return f"{pid}:{(_status(pid) or ('', ''))[1]}"


def lives(process: str) -> bool:
    """Whether the process with this `process_id` lives on this machine; a zombie does not."""
    pid, _, start = process.partition(":")
    status = _status(int(pid)) if pid.isdigit() else None
    return status is not None and status[1] == start and status[0] != "Z"


def _status(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process; None if there is no such process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return words[0], words[19]
    except (OSError, IndexError):
        return None
