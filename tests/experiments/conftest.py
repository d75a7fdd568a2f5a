"""What the tests of runs in processes of their own have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def uninterrupted(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `forked.TINY` that nobody disturbed. Not to be written to."""
    from tests.experiments.forked import run  # imports torch

    out = tmp_path_factory.mktemp("whole")
    status, output = run(nano, out)
    assert status == 0, output
    return out
