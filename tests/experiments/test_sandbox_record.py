from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.data.prompts import PromptDataset
from skyrl.errors import UserError
from skyrl.experiments import preflight
from skyrl.runs.inputs import sandbox_in_force
from skyrl.runs.run_folder import RunFolder
from skyrl.sandbox import sandbox
from skyrl.sandbox.sandbox import Sandbox
from skyrl.sandbox.tiers import Tier
from skyrl.trajectory import Prompt
from skyrl.tree import evolve_at
from tests.nano_run import metrics, train


def dataset(env_class: str) -> PromptDataset:
    return PromptDataset(prompts=(Prompt(id="0", messages=(), token_ids=(1,), env_class=env_class),), too_long=0)


def test_the_tier_in_force_is_told_and_kept_in_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = sandbox_in_force(SkyRLTrainConfig(), dataset("code"), None)
    assert record is not None
    assert record["tier"] == sandbox.strongest_tier()
    assert f"code: runs in sandboxes of the tier {record['tier']!r}" in capsys.readouterr().err
    folder = RunFolder(tmp_path)
    folder.record_sandbox(record)
    assert json.loads((tmp_path / "sandbox.json").read_text(encoding="utf-8")) == record


def test_a_run_without_sandboxes_has_no_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox_in_force(SkyRLTrainConfig(), dataset("gsm8k"), None) is None
    assert capsys.readouterr().err == ""


def test_a_run_that_asks_for_a_tier_that_is_not_there_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "why_unavailable", lambda tier: "no" if tier == "bwrap" else "")
    run = evolve_at(SkyRLTrainConfig(), "environment.skyrl_gym.sandbox_tier", "bwrap")
    with pytest.raises(UserError, match="'bwrap' is not available"):
        sandbox_in_force(run, dataset("code"), None)


BROKEN = {"bwrap": "bwrap: setting up uid map: Permission denied", "namespace": "no"}


@pytest.mark.parametrize(("tier", "lacking"), [("namespace", ["bwrap"]), ("process", ["bwrap", "namespace"])])
def test_a_tier_that_is_weaker_than_it_could_be_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tier: Tier, lacking: list[str]
) -> None:
    monkeypatch.setattr(sandbox, "why_unavailable", lambda name: BROKEN[name] if name in lacking else "")
    monkeypatch.setattr(sandbox, "strongest_tier", lambda: tier)
    monkeypatch.setattr(preflight, "strongest_tier", lambda: tier)
    reason = "; ".join(f"'{name}' does not start here: {BROKEN[name]}" for name in lacking)
    remedy = f'to accept the tier, set environment.skyrl_gym.sandbox_tier = "{tier}"'
    run = evolve_at(SkyRLTrainConfig(), "environment.env_class", "code")
    sandbox_in_force(run, dataset("code"), None)
    assert f"warning: {reason}; {remedy}" in capsys.readouterr().err
    [problem] = preflight.the_sandbox_starts(run)
    assert (problem.severity, problem.hint) == ("warning", remedy) and problem.message.endswith(reason)
    accepted = evolve_at(run, "environment.skyrl_gym.sandbox_tier", tier)
    sandbox_in_force(accepted, dataset("code"), None)
    assert "warning" not in capsys.readouterr().err and [*preflight.the_sandbox_starts(accepted)] == []
    assert [*preflight.the_sandbox_starts(evolve_at(run, "environment.env_class", "gsm8k"))] == []


def test_doctor_names_a_chosen_tier_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "why_unavailable", BROKEN.get)
    monkeypatch.setattr(preflight, "strongest_tier", lambda: "process")
    chosen = {"environment.env_class": "code", "environment.skyrl_gym.sandbox_tier": "bwrap"}
    run = SkyRLTrainConfig()
    for path, value in chosen.items():
        run = evolve_at(run, path, value)
    [problem] = preflight.the_sandbox_starts(run)
    assert problem.severity == "error"
    assert problem.message == f"'bwrap' does not start here: {BROKEN['bwrap']}"
    assert problem.hint == 'the strongest tier that starts here is "process"'


@pytest.mark.long
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
