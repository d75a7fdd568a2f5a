"""Process settings that must be made before torch is imported or computes for the first time."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

TORCH_ENVIRONMENT: Mapping[str, str] = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "24",
    "LRU_CACHE_CAPACITY": "24",
    "MALLOC_ARENA_MAX": "1",
}
"""Default environment variables of every process of a run. Threads that wait for each other give up their core, which
another process may need. On a CPU, oneDNN keeps a compiled kernel of about a megabyte for each shape of a matrix
product: a layer and its gradients need up to 20, which serve every layer, while the number of rows changes at every
step of generation. With one malloc arena for each thread, glibc's default, memory that a thread has freed is not reused
by others: the threads of environment and engine hold 30 MB of a small run, a learner of 135M parameters on Ray half a
gigabyte."""

_M_ARENA_MAX = -8
"""glibc's number for the setting M_ARENA_MAX, see mallopt(3)."""


def set_torch_environment() -> None:
    """Set what the user has not set. To be called before torch is imported, and before threads are started."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        _share_one_arena()  # glibc reads the variable when a process starts
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _share_one_arena() -> None:
    """Make all threads of this process allocate from one arena. Other C libraries have no arenas."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
