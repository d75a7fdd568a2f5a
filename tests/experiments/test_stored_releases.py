"""What earlier releases stored still loads: a run's folder of each, in `tests/stored`, written by that release.

Each folder holds a run of six recorded steps of the nano model with its data. Paths are relative to the folder, the
checkpoint is that of step 4, `run/model` is the model after step 6, `overrides.json` the configuration as written.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from skyrl.cli.main import cli
from skyrl.config import compose
from skyrl.experiments.ppo import BasePPOExp
from skyrl.tracking.recording import Recording

STORED = Path(__file__).parents[1] / "stored"
RELEASES = sorted(folder.name for folder in STORED.iterdir())


@pytest.fixture(params=RELEASES)
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the release's folder, which is the working directory."""
    folder = Path(shutil.copytree(STORED / request.param, tmp_path / "stored"))
    monkeypatch.chdir(folder)
    return folder


def test_a_run_resumes_from_a_checkpoint_of_an_earlier_release(stored: Path) -> None:
    final = load_file(stored / "run" / "model" / "model.safetensors")
    composed = compose([], json.loads((stored / "overrides.json").read_text(encoding="utf-8")))
    assert BasePPOExp(composed.config).run()
    steps = [json.loads(line)["step"] for line in (stored / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    resumed = load_file(stored / "run" / "model" / "model.safetensors")
    for name, weight in final.items():
        torch.testing.assert_close(resumed[name], weight, atol=1e-4, rtol=1e-4)


def test_a_recording_of_an_earlier_release_is_read_and_replayed(stored: Path) -> None:
    recording = Recording(stored / "run" / "recording")
    assert recording.steps() == [1, 2, 3, 4, 5, 6]
    assert [len(recording.sampled(step).groups) for step in recording.steps()] == [4] * 6
    result = CliRunner().invoke(
        cli, ["replay", "run", "--step", "1-2", "--checkpoints", "checkpoints"], standalone_mode=False
    )
    assert result.exception is None, result.output
    assert "step 1" in result.output
    differing = re.findall(r"(-?[\d.]+) recorded, (-?[\d.]+) now", result.output)  # another processor rounds otherwise
    assert differing or "step 2" in result.output
    assert all(float(now) == pytest.approx(float(then), abs=1e-4) for then, now in differing)


@pytest.mark.parametrize("command", [["config", "check"], ["config", "show", "--sparse"], ["plan"]])
def test_a_stored_configuration_of_an_earlier_release_is_read_by(command: list[str], stored: Path) -> None:
    reward = "environment.env_class=nano/reward.py:in_ascii"  # code has to be named again
    result = CliRunner().invoke(cli, [*command, "run/config.json", reward], standalone_mode=False)
    assert result.exception is None, result.output


def test_checkpoints_of_an_earlier_release_are_listed_and_verified(stored: Path) -> None:
    result = CliRunner().invoke(cli, ["ckpt", "verify", "checkpoints"], standalone_mode=False)
    assert result.exception is None, result.output
    assert result.output.split() == ["4", "good"]
