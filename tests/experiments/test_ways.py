"""The paths of `docs/architecture.md`, followed in a process of its own: CPython 3.11 can crash when a function that
looks at frames is called for every call of a process that has run thousands of tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forkserver import CONTEXT

pytestmark = pytest.mark.xdist_group("forked")

ROOT = Path(__file__).parents[2]


def follow(output: Path) -> None:
    """Follows the paths in this process, and writes what pytest says into a file."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o644), 1)
    os.chdir(ROOT)
    sys.exit(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "tests/experiments/traced_ways.py"]))


def test_the_paths_are_those_of_the_tables(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=follow, args=(tmp_path / "output",))
    process.start()
    process.join()
    output = (tmp_path / "output").read_text(encoding="utf-8")
    assert process.exitcode == 0 and "2 passed" in output, output[-5000:]
