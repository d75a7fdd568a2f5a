from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.data.prompts import PromptDataset
from skyrl.errors import UserError
from skyrl.runs.inputs import sandbox_in_force
from skyrl.runs.run_folder import RunFolder
from skyrl.sandbox import sandbox
from skyrl.sandbox.sandbox import Sandbox
from skyrl.trajectory import Prompt
from skyrl.tree import evolve_at
from tests.nano_run import metrics, train


def dataset(env_class: str) -> PromptDataset:
    return PromptDataset(prompts=(Prompt(id="0", messages=(), token_ids=(1,), env_class=env_class),), too_long=0)


def test_the_tier_in_force_is_told_and_kept_in_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sandbox_in_force(SkyRLTrainConfig(), dataset("code"), None)
    assert found is not None
    assert found["tier"] == sandbox.strongest_tier()
    assert f"code: runs in sandboxes of the tier {found['tier']!r}" in capsys.readouterr().err
    folder = RunFolder(tmp_path)
    folder.record_sandbox(found)
    assert json.loads((tmp_path / "sandbox.json").read_text(encoding="utf-8")) == found


def test_a_run_without_sandboxes_has_no_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox_in_force(SkyRLTrainConfig(), dataset("gsm8k"), None) is None
    assert capsys.readouterr().err == ""


def test_a_run_that_asks_for_a_tier_that_is_not_there_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "why_unavailable", lambda tier: "no" if tier == "bwrap" else "")
    run = evolve_at(SkyRLTrainConfig(), "environment.skyrl_gym.sandbox_tier", "bwrap")
    with pytest.raises(UserError, match="'bwrap' is not available"):
        sandbox_in_force(run, dataset("code"), None)


def test_a_run_keeps_the_tier_that_its_programs_ran_in(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("def task(completion, **columns):\n    return len(completion) % 2\n", encoding="utf-8")
    tmp_path.chmod(0o755)  # a run of root's: its programs are other users
    changes = {"environment__env_class": f"{file}:task", "environment__skyrl_gym__isolate_user_env": True}
    train(nano, tmp_path / "out", **changes, trainer__max_training_steps=1, trainer__eval_before_train=False)
    kept = json.loads((tmp_path / "out" / "run" / "sandbox.json").read_text(encoding="utf-8"))
    assert kept == Sandbox().record() | {"environments": [f"{file}:task"]}
    assert kept["tier"] == sandbox.strongest_tier()
    assert metrics(tmp_path / "out")[-1]["rollout/failures"] == 0
