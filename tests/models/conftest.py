"""Copies of the nano model that a test may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(nano: Path, tmp_path: Path) -> Path:
    """A model folder of the test's own: Qwen2 with a tied head, two layers of 32, and a byte-level tokenizer."""
    return shutil.copytree(nano / "model", tmp_path / "model")
