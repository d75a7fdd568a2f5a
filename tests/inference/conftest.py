"""What the tests of servers that fail share."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.inference.servers import http_connection, http_engine
from tests.inference.vllm_models import saved, small_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model."""
    return saved(tmp_path_factory.mktemp("small") / "model", small_model())


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to servers of others wait for little."""
    monkeypatch.setattr(http_connection, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(http_connection, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(http_connection, "_LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(http_engine, "CLOSING_SECONDS", 0.3)
