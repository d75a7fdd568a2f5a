"""Environment variables that torch reads once, when it is imported or computes for the first time."""

from __future__ import annotations

import os
from collections.abc import Mapping

TORCH_ENVIRONMENT: Mapping[str, str] = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
"""Defaults of every process of a run. Threads that wait for each other give up their core, which another process may
need. On a CPU, oneDNN keeps a compiled kernel for each shape of a matrix product, about a megabyte each: 64 of them
serve as well as 1,024, where the number of rows changes at every step of generation."""


def set_torch_environment() -> None:
    """Set what the user has not set. To be called before torch is imported."""
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
