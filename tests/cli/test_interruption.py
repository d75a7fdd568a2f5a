"""A run that is interrupted from outside: what it says, and that the next one goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
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
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=out)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Reads what the run says, up to the line of the step."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        if re.match(rf"step +{step}/", line):
            return
        lines.append(line)
    raise AssertionError(f"the run ended before step {step}: {''.join(lines)}")


def rest(process: subprocess.Popen[str]) -> str:
    """What the run says until it ends."""
    assert process.stderr is not None
    with process:
        return process.stderr.read()


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
    wait_for_step(process, step)
    process.kill()
    rest(process)
    train(nano, tmp_path / "killed", **LONG)
    assert_ends_alike(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long  # tests/experiments/test_signals.py has it by default, in a fork
def test_control_c_ends_a_run_at_once_with_one_line_and_130(nano: Path, tmp_path: Path) -> None:
    process = start(nano, tmp_path, trainer__epochs=1000)
    wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    errors = rest(process)
    assert process.returncode == 130
    assert "Traceback" not in errors
    [step] = re.findall(r"^Stopped\. Step (\d+) is saved: the same command continues after it\.$", errors, re.MULTILINE)
    assert (tmp_path / "checkpoints" / f"global_step_{step}").is_dir()


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_signals_after_the_last_line_change_no_exit_code(
    nano: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(nano, tmp_path, trainer__epochs=1000)
    wait_for_step(process, 1)
    process.send_signal(number)
    assert process.stderr is not None
    assert any("is saved" in line for line in process.stderr)
    while process.poll() is None:  # until the very end
        process.send_signal(number)
    assert "Traceback" not in rest(process)
    assert process.returncode == code


@pytest.mark.long
def test_a_closed_pipe_changes_no_exit_code() -> None:
    command = [sys.executable, "-m", "skyrl.cli", "config", "docs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
