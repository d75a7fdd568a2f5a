"""Names in the folder of a run's checkpoints."""

from __future__ import annotations

import re

STEP_FOLDER = re.compile(r"global_step_(\d+)")


def name_of(step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"global_step_{step}"


def step_of(folder: str) -> int | None:
    """The step whose checkpoint a folder of this name holds; None for any other name."""
    name = STEP_FOLDER.fullmatch(folder.rstrip("/").rpartition("/")[2])
    return int(name[1]) if name else None
