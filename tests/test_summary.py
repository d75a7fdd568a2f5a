"""The end of a test run says what was not tested for want of something that the machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import conftest


@pytest.mark.long
def test_a_sandbox_tier_that_is_not_there_is_named_at_the_end(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sandbox", "-k", "folder_is_removed"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PATH": str(tmp_path)},  # no command is there, bubblewrap's neither
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "NOT TESTED: sandbox tier bwrap: there is no command 'bwrap'; install bubblewrap" in result.stdout
    assert "sandbox tier process: 1 tests" in result.stdout


def test_what_an_ordinary_user_cannot_test_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("skyrl.sandbox.memory_groups._parents", lambda: iter(()))
    assert list(conftest._lacks_for_root()) == [
        "NOT TESTED: sandboxes of a run as root: the tests run as an ordinary user",
        "NOT TESTED: control groups of sandboxes: this user may make none on this machine",
    ]
