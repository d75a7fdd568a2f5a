"""Programs in a process that has imported nothing yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_program(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What a Python program printed, from the root of the project; raises `CalledProcessError` where it fails."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
