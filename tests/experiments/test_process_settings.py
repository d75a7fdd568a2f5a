"""Settings of the whole process that a user's code changes are named: after the step, and if the run then fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from skyrl.errors import RunError, UserError
from skyrl.runs.run_owner import owner, sign
from skyrl.runs.session import ProcessSettings
from tests.experiments.forked import run
from tests.nano_run import train

CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "torch.set_default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "torch.use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "torch.set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "torch.autograd.set_detect_anomaly": (
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: setattr(torch.backends.cudnn, "benchmark", False),
    ),
    "sys.setrecursionlimit": (lambda: sys.setrecursionlimit(900), lambda: sys.setrecursionlimit(1000)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_told_once_and_named_in_the_failure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, restore = CHANGES[name]
    restore()
    settings = ProcessSettings()
    settings.log(1, {})
    with pytest.raises(ValueError, match="of another cause"), settings.named_in_failures():
        raise ValueError("of another cause")
    assert capsys.readouterr().err == ""
    try:
        change()
        settings.log(2, {})
        settings.log(3, {})
        stderr = capsys.readouterr().err
        assert stderr.count("warning: code of this run") == 1 and f"({name}: " in stderr
        with pytest.raises(UserError, match="whose message says it"), settings.named_in_failures():
            raise UserError("whose message says it")
        message = rf"\({name}: .* before, .* now\). The run then failed: ValueError: of the dtype"
        with pytest.raises(RunError, match=message), settings.named_in_failures():
            raise ValueError("of the dtype")
    finally:
        restore()


def test_a_reward_that_changes_the_default_dtype_is_named_in_place_of_a_traceback(nano: Path, tmp_path: Path) -> None:
    source = (
        "import torch\ndef reward(completion, **others):\n    torch.set_default_dtype(torch.float64)\n    return 1.0\n"
    )
    (tmp_path / "reward.py").write_text(source)
    try:
        with pytest.raises(RunError, match="set_default_dtype: torch.float32 before, torch.float64 now"):
            train(nano, tmp_path, environment__env_class=f"{tmp_path / 'reward.py'}:reward")
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_reward_that_leaves_no_room_for_calls_is_named_wherever_the_run_then_fails(
    nano: Path, tmp_path: Path
) -> None:
    """With 60 frames, the steps may still work; what comes after them, such as the export, does not."""
    source = "import sys\ndef reward(completion, **others):\n    sys.setrecursionlimit(60)\n    return 1.0\n"
    (tmp_path / "reward.py").write_text(source)
    task = f"{tmp_path / 'reward.py'}:reward"
    status, output = run(nano, tmp_path / "out", environment__env_class=task, trainer__max_training_steps=1)
    assert (status, "Traceback" in output) == (1, False), output
    assert "(sys.setrecursionlimit: 1000 before, 60 now). The run then failed: RecursionError: maximum" in output


def test_a_run_returns_to_its_working_folder_after_a_reward_that_left_it(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(nano / "model")
    source = "import os\ndef reward(completion, **others):\n    os.chdir('/')\n    return 1.0\n"
    (tmp_path / "reward.py").write_text(source)
    changes = {"environment__env_class": "reward.py:reward", "trainer__policy__model__path": "model"}
    train(nano, tmp_path / "out", trainer__max_training_steps=1, **changes)
    assert capsys.readouterr().err.count(f"(os.chdir: {tmp_path} before, / now)") == 1
    assert Path.cwd() == tmp_path


def test_a_working_folder_that_was_removed_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    settings = ProcessSettings()
    os.chdir(tmp_path)
    (tmp_path / "gone").rmdir()
    settings.log(1, {})
    assert "os.chdir" in capsys.readouterr().err


@pytest.mark.parametrize("zone", ["XXX+30", "UTC", "Asia/Kolkata", "no such zone"])
def test_a_folder_is_signed_in_any_time_zone(zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        sign(tmp_path)
        assert "since 20" in owner(tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()
