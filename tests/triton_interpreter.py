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
    kernels_folder = Path(sys.prefix) / "kernels"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{kernels_folder}{os.pathsep}{ROOT}"}
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
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
