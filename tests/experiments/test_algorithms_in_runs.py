"""Algorithms that have parts beyond a loss: a critic, a weight that changes, a batch that is filled up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.errors import RunError
from skyrl.learners.workers.roles import PolicyWorker
from skyrl.tools.replay import Replay
from tests.experiments.sameness import assert_same
from tests.nano_run import metrics, train

CRITIC: dict[str, Any] = {
    "trainer__critic_mini_batch_size": 4,
    "trainer__critic__optimizer_config__lr": 1e-2,
    "trainer__algorithm__advantage_estimator": "gae",
    "trainer__algorithm__normalize_values": True,
    "trainer__algorithm__use_kl_in_reward": True,
    "trainer__algorithm__kl_loss_coef": 0.1,
    "trainer__algorithm__kl_ctrl__type": "adaptive",
    "trainer__algorithm__kl_ctrl__horizon": 100,
    "trainer__eval_before_train": False,
    "trainer__eval_interval": -1,
    "trainer__deterministic": True,
}


@pytest.mark.long
def test_a_resumed_run_has_the_critic_and_the_kl_weight_that_it_had(nano: Path, tmp_path: Path) -> None:
    own = CRITIC | {"trainer__critic__model__path": str(nano / "model")}
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    train(nano, uninterrupted, trainer__max_training_steps=4, **own)
    for steps in (2, 4):
        train(nano, parts, trainer__max_training_steps=steps, **own)
    assert metrics(parts) == metrics(uninterrupted)
    weights = [row["loss/kl_loss_coef"] for row in metrics(uninterrupted)[1:]]
    assert weights[0] == 0.1
    assert len(set(weights)) == 4  # it changes after every step, by 0.2 x 12 / 100 at most
    assert all(0 < row["critic/critic_loss"] < 10 for row in metrics(uninterrupted)[1:])


@pytest.mark.long
def test_leaving_out_old_logprobs_that_the_loss_does_not_read_changes_nothing(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {
        "trainer__algorithm__policy_loss_type": "dppo",
        "trainer__policy_mini_batch_size": 2,
        "trainer__micro_train_batch_size_per_gpu": 3,
        "trainer__max_training_steps": 2,
        "trainer__eval_before_train": False,
        "trainer__deterministic": True,
    }
    batch_sizes: list[int] = []
    score = PolicyWorker.score

    async def counted(self: PolicyWorker, batch: TrainingBatch) -> Tensor:
        batch_sizes.append(len(batch))
        return await score(self, batch)

    monkeypatch.setattr(PolicyWorker, "score", counted)
    train(nano, tmp_path / "without", **own)
    assert 12 not in batch_sizes  # the rows of a batch; the canary asks about a few prompts of its own
    monkeypatch.setattr("skyrl.training.trainer.scores_old_logprobs", lambda algorithm, updates: True)
    train(nano, tmp_path / "with", **own)
    assert batch_sizes.count(12) == 2
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")


@pytest.mark.long
def test_a_run_with_dynamic_sampling_that_was_stopped_goes_on_exactly(nano: Path, tmp_path: Path) -> None:
    changes = {
        "trainer__algorithm__dynamic_sampling": {"type": "filter", "max_sample_batches": 0},
        "trainer__deterministic": True,
        "trainer__epochs": 3,
        "trainer__eval_interval": -1,
        "trainer__eval_before_train": False,
    }
    train(nano, tmp_path / "whole", **changes, trainer__max_training_steps=4)
    for steps in (2, 4):
        train(nano, tmp_path / "stopped", **changes, trainer__max_training_steps=steps)
    assert any(row.get("generate/sampled_batches", 0) > 1 for row in metrics(tmp_path / "whole"))
    assert_same(tmp_path / "stopped", tmp_path / "whole")


REFRESHED: dict[str, Any] = {
    "trainer__algorithm__use_kl_loss": True,
    "trainer__update_ref_every_epoch": True,
    "trainer__deterministic": True,
    "trainer__epochs": 3,
    "trainer__train_batch_size": 12,
    "trainer__policy_mini_batch_size": 12,
    "trainer__ckpt_interval": 3,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}
"""Two steps in an epoch; a checkpoint in the middle of the second."""


@pytest.mark.long
def test_the_reference_is_refreshed_after_every_epoch_and_a_resumed_run_has_it(nano: Path, tmp_path: Path) -> None:
    for out, lengths in (("whole", [5]), ("stopped", [3, 5])):
        for steps in lengths:
            train(nano, tmp_path / out, **REFRESHED, trainer__max_training_steps=steps)
    rows = metrics(tmp_path / "whole")[1:]
    assert [row["policy/policy_kl"] < 1e-6 for row in rows] == [True, False, True, False, True]
    assert_same(tmp_path / "stopped", tmp_path / "whole")
    checkpoint = tmp_path / "stopped" / "checkpoints" / "global_step_3"
    reference, policy = (load_file(checkpoint / model / "rank_0_of_1.safetensors") for model in ("ref", "policy"))
    assert reference.keys() == {name for name in policy if name.startswith("model.")}
    assert not all(torch.equal(reference[name], policy[name]) for name in reference)  # which is a step further


@pytest.mark.long
def test_a_refreshed_reference_is_the_policy_with_its_adapter(nano: Path, tmp_path: Path) -> None:
    adapted = {"trainer__policy__model__lora__rank": 4, "trainer__max_training_steps": 3, "trainer__recording": "jsonl"}
    train(nano, tmp_path, **REFRESHED, **adapted)
    assert [row["policy/policy_kl"] < 1e-6 for row in metrics(tmp_path)[1:]] == [True, False, True]
    assert [step.differences for step in Replay(tmp_path / "run").run(range(1, 4))] == [(), (), ()]


def test_dynamic_sampling_that_finds_nothing_ends_with_what_to_do(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "always.py"
    file.write_text("def right(completion, **others):\n    return 1.0\n", encoding="utf-8")
    changes = {
        "environment__env_class": f"{file}:right",
        "trainer__algorithm__dynamic_sampling": {"type": "filter", "max_sample_batches": 2},
        "trainer__eval_before_train": False,
    }
    with pytest.raises(RunError, match="0 groups of different rewards, 4 are needed"):
        train(nano, tmp_path, **changes)


def test_a_batch_without_a_group_that_teaches_changes_no_weight(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "always.py"
    file.write_text("def right(completion, **others):\n    return 1.0\n", encoding="utf-8")
    changes = {"environment__env_class": f"{file}:right", "trainer__algorithm__zero_variance_filter": True}
    train(nano, tmp_path, trainer__max_training_steps=1, trainer__eval_before_train=False, **changes)
    [step] = [row for row in metrics(tmp_path) if row["step"]]
    assert step["reward/num_zero_variance_filtered"] == 4
    assert step["policy/mini_batches_without_a_token"] == 1
