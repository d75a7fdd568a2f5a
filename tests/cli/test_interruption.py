"""A run that is interrupted from outside: what it says, and that the next one goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.nano_run import metrics, overrides, train

LONG = {"trainer__deterministic": True, "trainer__epochs": 5, "trainer__ckpt_interval": 4, "trainer__eval_interval": 10}


def start(nano: Path, out: Path, **changes: Any) -> subprocess.Popen[str]:
    """The command, in a process of its own."""
    values = overrides(nano, out, **LONG | changes)
    words = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]
    command = [sys.executable, "-m", "skyrl.cli", "run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out)


def wait_for_step(out: Path, step: int) -> None:
    file = out / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (file.exists() and file.read_text(encoding="utf-8").count("\n") > step):
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.02)


def assert_ends_alike(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    first, second = (load_file(out / "run" / "model" / "model.safetensors") for out in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long  # tests/experiments/test_kills.py has ten by default
@pytest.mark.parametrize("step", [2, 9])
def test_a_killed_run_ends_like_one_that_was_not(nano: Path, tmp_path: Path, step: int) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    train(nano, tmp_path / "whole", **LONG)
    process = start(nano, tmp_path / "killed")
    wait_for_step(tmp_path / "killed", step)
    process.kill()
    process.communicate()
    train(nano, tmp_path / "killed", **LONG)
    assert_ends_alike(tmp_path / "killed", tmp_path / "whole")


def test_control_c_ends_a_run_at_once_with_one_line_and_130(nano: Path, tmp_path: Path) -> None:
    process = start(nano, tmp_path, trainer__epochs=1000)
    wait_for_step(tmp_path, 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    [step] = re.findall(r"^Stopped\. Step (\d+) is saved: the same command goes on after it\.$", errors, re.MULTILINE)
    assert (tmp_path / "checkpoints" / f"global_step_{step}").is_dir()


def test_output_that_nobody_reads_changes_no_exit_code_and_raises_no_complaint() -> None:
    command = [sys.executable, "-m", "skyrl.cli", "config", "docs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
