"""The paths of `docs/architecture.md`, followed in a process of its own: CPython 3.11 can crash when a function that
looks at frames is called for every call of a process that has run thousands of tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_paths_are_those_of_the_tables() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*command, "tests/experiments/traced_ways.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-5000:]
    assert "2 passed" in process.stdout
