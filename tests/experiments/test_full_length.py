"""Steps on made-up samples of the greatest length, which show whether a run fits and leave no trace in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.errors import RunError
from skyrl.experiments.full_length import full_length_rollouts, probe_run
from skyrl.experiments.ppo import BasePPOExp
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.runs.recovery import Recovery
from skyrl.training.describe import Metrics
from tests.nano_run import config


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Lengths of the rows of each mini-batch that the policy learns from."""
    seen: list[Tensor] = []
    forward_backward = LearnerGroup.forward_backward

    async def noted(learner: LearnerGroup[LearningWorker], batch: TrainingBatch, objective: Objective) -> Metrics:
        seen.append(batch.lengths)
        return await forward_backward(learner, batch, objective)

    monkeypatch.setattr(LearnerGroup, "forward_backward", noted)
    return seen


def test_each_made_up_step_learns_from_a_whole_batch_of_the_longest_rows(
    nano: Path, tmp_path: Path, learned: list[Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "trainer__num_dummy_steps": 2,
        "trainer__policy_mini_batch_size": 2,
        "trainer__micro_train_batch_size_per_gpu": 3,
    }
    experiment = BasePPOExp(config(nano, tmp_path, **changes))
    assert experiment.run()
    assert [lengths.tolist() for lengths in learned] == [[16 + 5] * 6] * 4  # 2 steps of 2 mini-batches of 2 x 3
    records = list(experiment.folder.metrics.read())
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["policy/grad_norm"] > 0 for record in records[1:])
    assert "2 made-up steps of 12 samples of 16 + 5 tokens fit" in capsys.readouterr().err


def test_a_run_trains_in_its_own_folder_after_made_up_steps(nano: Path, tmp_path: Path) -> None:
    BasePPOExp(config(nano, tmp_path, trainer__num_dummy_steps=1)).run()
    kept = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {("run", "full_length")}
    BasePPOExp(config(nano, tmp_path, trainer__num_dummy_steps=2)).run()  # the folder is free for other steps
    BasePPOExp(config(nano, tmp_path, trainer__max_training_steps=1)).run()
    assert (tmp_path / "run" / "model").is_dir()


def test_several_turns_make_a_row_as_long_as_the_last_input_with_its_answer(nano: Path, tmp_path: Path) -> None:
    turns = {"generator__max_turns": 3, "generator__max_input_length": 30}
    batch = full_length_rollouts(config(nano, tmp_path, trainer__num_dummy_steps=1, **turns), vocabulary=7)
    [trajectory, *_] = asyncio.run(batch.next_batch(0))[0].trajectories
    assert (len(trajectory.prompt_ids), len(trajectory.response_ids)) == (16, 30 - 16 + 5)
    assert set(trajectory.response_ids) <= set(range(7))


def test_made_up_steps_are_not_tried_again(nano: Path, tmp_path: Path) -> None:
    run = config(nano, tmp_path, trainer__num_dummy_steps=1, trainer__recover_mode="auto", trainer__recover_retries=2)
    assert probe_run(run).trainer.recover_mode is None
    assert not Recovery(run).follows(RunError("no memory"))
