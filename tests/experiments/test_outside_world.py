"""A run depends on its configuration and its data: on no network, and on nothing in the environment around it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nano_run import as_words, metrics, overrides, train

STEPS = {"trainer__max_training_steps": 2, "trainer__deterministic": True}


def test_a_run_on_local_files_looks_up_no_name_and_connects_to_nobody(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Any] = []

    def refuse(*where: Any, **_: Any) -> Any:
        attempts.append(where)
        raise OSError("there is no network")

    def connect(self: socket.socket, address: Any) -> None:
        refuse(address)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # nothing tells the libraries that they are offline
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket.socket, "connect_ex", connect)
    train(nano, tmp_path, **STEPS)
    assert attempts == []
    assert len(metrics(tmp_path)) >= 2


@pytest.mark.long
def test_a_run_is_the_same_under_another_hash_seed_time_zone_and_locale(nano: Path, tmp_path: Path) -> None:
    surroundings = (
        {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C", "COLUMNS": "80"},
        {"PYTHONHASHSEED": "4242", "TZ": "Pacific/Kiritimati", "LC_ALL": "tr_TR.UTF-8", "COLUMNS": "20"},
    )
    found = []
    for number, environ in enumerate(surroundings):
        out = tmp_path / str(number)
        out.mkdir()
        words = as_words(overrides(nano, out, **STEPS))
        subprocess.run(
            [sys.executable, "-m", "skyrl.cli", "run", *words], env=os.environ | environ, check=True, cwd=out
        )
        found.append((metrics(out), (out / "run" / "model" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]
