"""Runs tests of Triton's kernels without a GPU: in a process of their own, in which Triton interprets them.

Triton is installed beside the environment, not in it (`make .venv/dev.stamp`): packages that find it, such as vLLM's
build for CPUs, behave differently.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_interpreted(file: str) -> None:
    """Run a file of tests, which may import triton. Fails with their output if one of them fails."""
    beside = Path(sys.prefix) / "kernels"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{beside}{os.pathsep}{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-o",
        "addopts=--import-mode=importlib",
        file,
    ]
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
