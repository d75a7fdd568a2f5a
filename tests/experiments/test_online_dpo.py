"""Runs with pairs of the policy's own answers: they learn, and go on as they were after an interruption."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from skyrl.tools.replay import Replay
from tests.experiments.forked import run
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same, assert_same_files
from tests.experiments.test_step_wise import run as run_of_two_turns
from tests.nano_run import metrics, train

PAIRS: dict[str, Any] = {
    "trainer__algorithm__policy_loss_type": "online_dpo",
    "trainer__eval_before_train": False,
    "trainer__eval_interval": -1,
    "trainer__deterministic": True,
}
LORA: dict[str, Any] = {"trainer__policy__model__lora__rank": 4, "trainer__policy__model__lora__alpha": 8}
ASYNC: dict[str, Any] = {"trainer__fully_async__enabled": True, "trainer__fully_async__max_staleness_steps": 1}
ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
    "trainer__placement__ref_num_gpus_per_node": 2,
    "trainer__micro_train_batch_size_per_gpu": 3,
}


@pytest.mark.long
def test_a_policy_learns_from_pairs_of_its_own_answers(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, **PAIRS, trainer__epochs=4, trainer__ckpt_interval=-1)
    rows = [row for row in metrics(tmp_path) if row["step"]]
    assert len(rows) == 24
    rewards = [row["reward/avg_raw_reward"] for row in rows]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1
    first = rows[0]
    assert first["policy/pairs/margin"] == pytest.approx(0, abs=1e-6)  # the policy still is the reference
    assert first["loss/pairs"] + first["loss/groups_without_a_pair"] == 4
    assert max(row["policy/pairs/margin"] for row in rows if "policy/pairs/margin" in row) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"trainer__algorithm__online_dpo__pairs": "random", **LORA}, ASYNC])
def test_a_resumed_run_with_pairs_goes_on_exactly(nano: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    own = {**PAIRS, "trainer__policy_mini_batch_size": 2, "trainer__micro_train_batch_size_per_gpu": 3, **changes}
    train(nano, uninterrupted, trainer__max_training_steps=4, **own)
    for steps in (2, 4):
        train(nano, parts, trainer__max_training_steps=steps, **own)
    if changes is ASYNC:
        assert metrics(parts)[-1]["step"] == 4  # which samples were ready is not repeated
    else:
        assert metrics(parts) == metrics(uninterrupted)


@pytest.mark.long
def test_several_turns_are_compared_in_one_row_and_in_several(nano: Path, tmp_path: Path) -> None:
    for name, steps in (("one", False), ("several", True)):
        (tmp_path / name).mkdir()
        changes = {**PAIRS, "generator__step_wise_trajectories": steps, "trainer__max_training_steps": 2}
        rows = run_of_two_turns(nano, tmp_path / name, **changes)
        assert all(row["loss/pairs"] + row["loss/groups_without_a_pair"] == 4 for row in rows)
        assert any(row["loss/pairs"] for row in rows)


def test_a_recorded_run_with_pairs_is_replayed_exactly(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, **PAIRS, trainer__max_training_steps=2, trainer__recording="jsonl")
    assert [step.differences for step in Replay(tmp_path / "run").run(range(1, 3))] == [(), ()]


@pytest.mark.long
def test_a_run_with_pairs_that_is_killed_ends_like_one_that_was_not(nano: Path, tmp_path: Path) -> None:
    status, output = run(nano, tmp_path / "whole", **PAIRS)
    assert status == 0, output
    for phase in ("forward", "optimizer", "sync", "writing"):
        status, output = run(nano, tmp_path / "killed", Fault(phase=phase, nth=3), **PAIRS)
        assert status == -signal.SIGKILL, output
    status, output = run(nano, tmp_path / "killed", **PAIRS)
    assert status == 0, output
    assert_same(tmp_path / "killed", tmp_path / "whole")
    assert_same_files(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long
def test_two_ranks_learn_from_pairs_what_one_does(nano: Path, tmp_path: Path) -> None:
    for name, where in (("one", {}), ("two", ON_RAY)):
        status, output = run(nano, tmp_path / name, **PAIRS, trainer__max_training_steps=2, **where)
        assert status == 0, output
    compared = 0
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for metric in ("policy/final_loss", "policy/pairs/loss", "policy/grad_norm"):
            assert one.get(metric) == pytest.approx(two.get(metric), abs=1e-4)
            compared += metric in one
    assert compared == 6
