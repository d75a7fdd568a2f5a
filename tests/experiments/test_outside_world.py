"""A run depends on its configuration and its data: on no network, and on nothing in the environment around it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.sameness import tokens
from tests.nano_run import as_words, metrics, overrides, train

STEPS: dict[str, Any] = {"trainer__max_training_steps": 2, "trainer__deterministic": True}

ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__heartbeat_timeout_seconds": 600,  # a busy machine takes its time to import torch
}


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


NO_NETWORK = """
import os, socket

def refuse(*where, **_):
    with open(os.environ["ATTEMPTS"], "a") as file:
        print(os.getpid(), where, file=file)
    raise OSError("there is no network")

socket.getaddrinfo = refuse
socket.socket.connect = socket.socket.connect_ex = lambda self, address: refuse(address)
"""
"""A `sitecustomize` for a command and every Python process below it."""


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_no_process_of_a_command_on_local_files_connects_to_anybody(command: str, nano: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    attempts, out = tmp_path / "attempts", tmp_path / "out"
    out.mkdir()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "ATTEMPTS": str(attempts), "HF_HUB_OFFLINE": "0"}
    probe = "import socket; socket.create_connection(('127.0.0.1', 9))"
    assert subprocess.run([sys.executable, "-c", probe], env=environ, capture_output=True).returncode == 1
    assert "127.0.0.1" in attempts.read_text(encoding="utf-8")  # an attempt would be seen
    attempts.unlink()
    words = as_words(overrides(nano, out, **STEPS))
    subprocess.run([sys.executable, "-m", "skyrl.cli", command, *words], env=environ, check=True, cwd=out)
    assert not attempts.exists() or attempts.read_text(encoding="utf-8") == ""


@pytest.mark.long
def test_a_run_is_the_same_with_any_number_of_workers(nano: Path, tmp_path: Path) -> None:
    outcomes = []
    for workers in (1, 8):
        out = tmp_path / str(workers)
        train(nano, out, **STEPS, environment__skyrl_gym__max_env_workers=workers)
        outcomes.append((metrics(out), (out / "run" / "model" / "model.safetensors").read_bytes()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.long
def test_a_run_is_the_same_with_any_number_of_engines(nano: Path, tmp_path: Path) -> None:
    outcomes = []
    for engines in (1, 2):
        out = tmp_path / str(engines)
        out.mkdir()
        words = as_words(overrides(nano, out, **STEPS, **ON_RAY, generator__inference_engine__num_engines=engines))
        subprocess.run([sys.executable, "-m", "skyrl.cli", "run", *words], check=True, cwd=out)
        records = metrics(out)
        assert {record.pop("inference/engines_in_service") for record in records} == {engines}
        outcomes.append((records, tokens(out), (out / "run" / "model" / "model.safetensors").read_bytes()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.long
def test_a_run_is_the_same_under_another_hash_seed_time_zone_and_locale(nano: Path, tmp_path: Path) -> None:
    surroundings = (
        {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C", "COLUMNS": "80"},
        {"PYTHONHASHSEED": "4242", "TZ": "Pacific/Kiritimati", "LC_ALL": "tr_TR.UTF-8", "COLUMNS": "20"},
    )
    outcomes = []
    for number, environ in enumerate(surroundings):
        out = tmp_path / str(number)
        out.mkdir()
        words = as_words(overrides(nano, out, **STEPS))
        subprocess.run(
            [sys.executable, "-m", "skyrl.cli", "run", *words], env=os.environ | environ, check=True, cwd=out
        )
        outcomes.append((metrics(out), (out / "run" / "model" / "model.safetensors").read_bytes()))
    assert outcomes[0] == outcomes[1]
