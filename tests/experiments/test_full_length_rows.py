"""Made-up steps of supervised runs: whole batches of the longest rows, and no trace in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.batch import TrainingBatch
from skyrl.config import compose
from skyrl.errors import DataError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.full_length import supervised_without_traces
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.training.describe import Metrics
from tests.supervised_run import settings


@pytest.mark.parametrize(
    ("kind", "rows", "tokens"), [("sft", 8, 16), ("reward_model", 16, 16 + 1), ("preference", 16, 16)]
)
def test_each_made_up_step_learns_from_a_whole_batch_of_the_longest_rows(
    nano: Path,
    tmp_path: Path,
    kind: str,
    rows: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[list[int]] = []
    forward_backward = LearnerGroup.forward_backward

    async def noted(learner: LearnerGroup[LearningWorker], batch: TrainingBatch, objective: Objective) -> Metrics:
        seen.append(batch.lengths.tolist())
        return await forward_backward(learner, batch, objective)

    monkeypatch.setattr(LearnerGroup, "forward_backward", noted)
    changes = {"num_dummy_steps": 2, "max_length": 16, "train_datasets": (), "ckpt_interval": 1, "hf_save_interval": 1}
    config: Any = compose([], settings(nano, tmp_path, kind, **changes)).config
    assert experiment_class(config)(config).run()
    assert seen == [[tokens] * rows] * 2
    assert f"2 made-up steps of {rows} rows of 16 tokens fit" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"full_length"}
    assert not list(tmp_path.rglob("*.safetensors"))


def test_made_up_steps_are_taken_without_data_evaluation_and_recovery(nano: Path, tmp_path: Path) -> None:
    values = settings(nano, tmp_path, "sft", num_dummy_steps=1, recover_mode="auto", eval_before_train=True)
    held_out = {"eval_datasets": values["train_datasets"], "train_dataset_weights": (1.0,)}
    config: Any = compose([], values | held_out).config
    run = supervised_without_traces(config)
    assert (run.train_datasets, run.eval_datasets, run.train_dataset_weights) == ((), (), None)
    assert (run.recover_mode, run.eval_before_train, run.trainer.resume_mode) == (None, False, "none")
    assert run.run_path == str(tmp_path / "run" / "full_length")


def test_rows_without_any_bound_are_refused(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.experiments.sft.max_positions", lambda path, overrides: None)
    config: Any = compose([], settings(nano, tmp_path, "sft", num_dummy_steps=1)).config
    with pytest.raises(DataError, match="set max_length"):
        experiment_class(config)(config).run()
