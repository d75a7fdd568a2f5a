"""The one fact of the machine that derivation looks at: is there an NVIDIA GPU?"""

from __future__ import annotations

from pathlib import Path


def has_cuda_device() -> bool:
    """Does the kernel know an NVIDIA GPU? A look at the file system: no driver is loaded and no library imported."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))
