"""Memory use of this process, as the system reports it."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process in bytes, shared libraries included; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
