"""Runs whose teacher is the policy, or what it was, with a hint that the policy does not read."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl.checkpoint.shards import TensorSource
from skyrl.errors import DataError
from skyrl.learners.workers.roles import TeacherWorker
from tests.experiments.forked import run
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same, assert_same_files
from tests.long_cases import long_except
from tests.nano_run import metrics, train

D = "trainer__algorithm__distillation__"
HINTED: dict[str, Any] = {
    f"{D}task_coef": 0,
    f"{D}hint__source": "column",
    f"{D}hint__column": "reward_spec.ground_truth",
    "trainer__eval_before_train": False,
    "trainer__eval_interval": -1,
    "trainer__deterministic": True,
}
ITSELF = {f"{D}self_teacher": True, **HINTED}
LORA = {"trainer__policy__model__lora__rank": 4}
TWO_RANKS: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
    "trainer__micro_train_batch_size_per_gpu": 3,
}


def form(name: str) -> dict[str, Any]:
    return {f"{D}type": name}


@pytest.mark.long
def test_what_the_policy_was_teaches_it_to_do_without_the_hint(nano: Path, tmp_path: Path) -> None:
    """The divergence from the frozen model, which reads the hint, falls; it is that of the hint alone at first."""
    before = {"trainer__teacher__model__path": str(nano / "model"), "trainer__epochs": 5}
    rate = {"trainer__policy__optimizer_config__lr": 1e-2, "trainer__ckpt_interval": -1}
    train(nano, tmp_path, **HINTED, **before, **rate, **form("loss"))
    rows = metrics(tmp_path)[1:]
    distances = [row["policy/teacher_divergence"] for row in rows]
    assert all(row["loss/hinted"] == 1.0 for row in rows)
    assert distances[0] > 0.01 and sum(distances[-3:]) < 0.7 * sum(distances[:3])


@pytest.mark.long
@pytest.mark.parametrize(("name", "metric"), [("advantage", "loss/teacher_kl"), ("loss", "policy/teacher_divergence")])
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["whole", "lora"])
def test_a_resumed_run_that_teaches_itself_goes_on_exactly(
    name: str, metric: str, adapter: dict[str, Any], nano: Path, tmp_path: Path
) -> None:
    uninterrupted, parts, own = tmp_path / "whole", tmp_path / "parts", {**ITSELF, **form(name), **adapter}
    train(nano, uninterrupted, trainer__max_training_steps=4, **own)
    for steps in (2, 4):
        train(nano, parts, trainer__max_training_steps=steps, **own)
    assert metrics(parts) == metrics(uninterrupted)
    assert all(abs(row[metric]) > 1e-4 for row in metrics(uninterrupted)[1:])


def test_a_column_of_hints_that_no_row_has_is_refused_before_the_first_step(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'solution', which .*hint.column names; .* are reward_spec"):
        train(nano, tmp_path, **{**ITSELF, f"{D}hint__column": "solution"})


@pytest.mark.long
@pytest.mark.parametrize("name", ["advantage", "loss"])
def test_a_run_that_teaches_itself_and_is_killed_ends_like_one_that_was_not(
    name: str, nano: Path, tmp_path: Path
) -> None:
    changes = {**ITSELF, **form(name)}
    status, output = run(nano, tmp_path / "whole", **changes)
    assert status == 0, output
    for phase in ("forward", "optimizer", "sync", "writing"):
        status, output = run(nano, tmp_path / "killed", Fault(phase=phase, nth=3), **changes)
        assert status == -signal.SIGKILL, output
    status, output = run(nano, tmp_path / "killed", **changes)
    assert status == 0, output
    assert_same(tmp_path / "killed", tmp_path / "whole")
    assert_same_files(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("name", ["advantage", "loss"])
def test_two_ranks_that_teach_themselves_learn_what_one_does(name: str, nano: Path, tmp_path: Path) -> None:
    short = {"trainer__max_training_steps": 2, "trainer__micro_train_batch_size_per_gpu": 3}
    for where, changes in (("one", {}), ("two", TWO_RANKS)):
        status, output = run(nano, tmp_path / where, **{**ITSELF, **form(name), **short, **changes})
        assert status == 0, output
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for metric in ("policy/final_loss", "policy/teacher_divergence", "loss/teacher_kl", "loss/hinted"):
            assert one.get(metric) == pytest.approx(two.get(metric), abs=1e-4)


def moving(nano: Path, **changes: Any) -> dict[str, Any]:
    """Runs with a teacher that is the moving average of the policy."""
    settings = {f"{D}teacher_update_rate": 0.25, f"{D}task_coef": 1.0, "trainer__deterministic": True}
    return {**settings, "trainer__teacher__model__path": str(nano / "model"), "trainer__eval_interval": -1, **changes}


def test_the_policy_is_mixed_into_its_moving_average_after_a_step(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after: list[dict[str, torch.Tensor]] = []
    mix = TeacherWorker.mix

    def noted(worker: TeacherWorker, source: TensorSource, share: float) -> None:
        mix(worker, source, share)
        after.append({name: weight.clone() for name, weight in worker.model.state_dict().items()})

    monkeypatch.setattr(TeacherWorker, "mix", noted, raising=False)
    train(nano, tmp_path, **moving(nano, trainer__max_training_steps=1))
    [teacher] = after
    before, policy = (
        load_file(folder / "model.safetensors") for folder in (nano / "model", tmp_path / "run" / "model")
    )
    for name, weight in policy.items():
        assert not torch.equal(weight, before[name])
        torch.testing.assert_close(teacher[name], 0.25 * weight + 0.75 * before[name], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("form", long_except(["advantage", "loss"], "loss"))
def test_a_resumed_run_with_a_moving_teacher_goes_on_exactly(form: str, nano: Path, tmp_path: Path) -> None:
    own = moving(
        nano, **{f"{D}type": form, f"{D}teacher_sync_steps": 2}, **({f"{D}top_k": 8} if form == "loss" else {})
    )
    train(nano, tmp_path / "whole", trainer__max_training_steps=4, **own)
    for steps in (2, 4):
        train(nano, tmp_path / "parts", trainer__max_training_steps=steps, **own)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
