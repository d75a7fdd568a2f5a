"""Whole runs that sample while they train, in this process: equal to synchronous ones where they must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl.errors import RunError
from tests.nano_run import config, metrics, train

ASYNC: dict[str, Any] = {"trainer__fully_async__enabled": True, "trainer__algorithm__policy_loss_type": "decoupled"}


def sampled(out: Path) -> list[dict[str, Any]]:
    lines = (out / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "run" / "model" / "model.safetensors")


def test_without_staleness_a_run_is_the_synchronous_one_token_for_token(nano: Path, tmp_path: Path) -> None:
    """Twenty steps: the same tokens, rewards and weights, bit for bit."""
    same: dict[str, Any] = {"trainer__deterministic": True, "trainer__epochs": 20, "trainer__max_training_steps": 20}
    train(nano, tmp_path / "sync", **same)
    train(nano, tmp_path / "async", trainer__fully_async={"enabled": True, "max_staleness_steps": 0}, **same)
    assert sampled(tmp_path / "sync") == sampled(tmp_path / "async")
    assert len({record["step"] for record in sampled(tmp_path / "async")}) == 20
    one, other = weights(tmp_path / "sync"), weights(tmp_path / "async")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("interrupt", [True, False])
def test_samples_get_as_old_as_the_bound_and_no_older(nano: Path, tmp_path: Path, interrupt: bool) -> None:
    settings = {"enabled": True, "max_staleness_steps": 2, "interrupt_generation": interrupt}
    train(nano, tmp_path, trainer__fully_async=settings, trainer__algorithm__policy_loss_type="decoupled")
    steps = metrics(tmp_path)[1:]
    assert len(steps) == 6
    assert max(step["async/staleness_max"] for step in steps) == 2
    assert min(step["async/staleness_min"] for step in steps) >= 0
    prompts = [record["prompt_id"] for record in sampled(tmp_path) if record["sample"] == 0]
    assert len(prompts) == 24
    assert max(map(prompts.count, prompts)) <= 2, "no prompt comes again before the others of its epoch"


def test_new_weights_may_come_every_other_step_and_evaluation_sees_the_newest(nano: Path, tmp_path: Path) -> None:
    settings = {"enabled": True, "max_staleness_steps": 1, "steps_per_sync": 2}
    train(nano, tmp_path, trainer__fully_async=settings, trainer__algorithm__policy_loss_type="decoupled")
    versions = {record["step"]: record["weight_version"] for record in sampled(tmp_path)}
    assert all(step - 1 - version <= 1 for step, version in versions.items())
    assert set(versions.values()) <= {0, 2, 3, 4, 6}, "3 was sent for the evaluation of step 3"


def test_groups_that_are_not_accepted_are_replaced(nano: Path, tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "def even(group):\n    return int(group.prompt.id.rpartition(':')[2] or 0) % 2 == 0\n", encoding="utf-8"
    )
    settings = {"enabled": True, "max_staleness_steps": 1, "accept": f"{hook}:even"}
    train(nano, tmp_path, trainer__fully_async=settings, trainer__algorithm__policy_loss_type="decoupled")
    assert all(int(record["prompt_id"].rpartition(":")[2]) % 2 == 0 for record in sampled(tmp_path))
    assert sum(step["async/groups_refused"] for step in metrics(tmp_path)[1:]) > 0


def test_a_stall_ends_the_run_and_says_who_was_waited_for(nano: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\n\n\ndef slow(answer, **row):\n    time.sleep(3)\n    return 1.0\n", encoding="utf-8")
    settings = {"enabled": True, "stall_timeout_seconds": 0.2}
    with pytest.raises(RunError, match=r"0 of 4 groups are ready, \d+ are being sampled, and none has ended for 0.2 s"):
        train(
            nano,
            tmp_path,
            trainer__fully_async=settings,
            trainer__algorithm__policy_loss_type="decoupled",
            trainer__eval_before_train=False,
            environment__env_class=f"{slow}:slow",
        )


def test_a_run_that_goes_on_trains_on_every_prompt_of_its_epoch_once(nano: Path, tmp_path: Path) -> None:
    settings = {"enabled": True, "max_staleness_steps": 2}
    same: dict[str, Any] = {"trainer__fully_async": settings, "trainer__algorithm__policy_loss_type": "decoupled"}
    train(nano, tmp_path, trainer__max_training_steps=2, **same)
    train(nano, tmp_path, **same)
    prompts = [record["prompt_id"] for record in sampled(tmp_path) if record["sample"] == 0]
    per_epoch = len(set(prompts))
    assert {prompts.count(name) for name in set(prompts)} <= {24 // per_epoch, 24 // per_epoch + 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"queue_size": 3}, "3 groups never make a batch"),
        ({"steps_per_sync": 6}, "leave samples 5 versions old"),
    ],
)
def test_what_cannot_work_is_refused(nano: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        config(nano, tmp_path, trainer__fully_async={"enabled": True, **settings})
