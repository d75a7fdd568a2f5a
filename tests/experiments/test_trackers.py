"""Trackers in whole runs: the default one, and one run in each of them however often it is killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.forked import RunSession, run, run_of
from tests.experiments.phases import Fault
from tests.long_cases import long_except
from tests.nano_run import all_metrics, overrides
from tests.supervised_run import settings
from tests.tracking import readers

pytestmark = pytest.mark.xdist_group("forked")

TRACKED: dict[str, Any] = {
    "trainer__logger": ["console", "tensorboard", "wandb"],
    "trainer__trackers": {"sample_rows": 2, "finish_seconds": 240.0, "wandb": {"mode": "offline"}},
    "trainer__ckpt_interval": 5,
    "trainer__async_ckpt_save": False,  # so that the kill in step 8 finds the checkpoint of step 5 on every machine
}


@pytest.mark.long
def test_a_run_that_is_killed_and_resumed_is_one_run_in_each_tracker(nano: Path, tmp_path: Path) -> None:
    in_step_eight = Fault(phase="optimizer", nth=15)
    status, output = run(nano, tmp_path, in_step_eight, **TRACKED)
    assert status == -signal.SIGKILL, output
    status, output = run(nano, tmp_path, **TRACKED)
    assert status == 0 and "warning" not in output, output
    folder = tmp_path / "run"
    truth = [(row["step"], row[readers.METRIC]) for row in all_metrics(tmp_path) if row["step"]]
    assert [step for step, _ in truth] == list(range(1, 13))
    points = readers.in_tensorboard(folder)
    assert [step for step, _ in points] == list(range(1, 13))
    assert [value for _, value in points] == pytest.approx([value for _, value in truth])  # float32
    assert readers.in_wandb(folder) == truth


@pytest.mark.long
@pytest.mark.parametrize("kind", long_except(["sft", "reward_model"], "sft"))
def test_a_supervised_run_has_trackers_too(kind: str, nano: Path, tmp_path: Path) -> None:
    values = settings(nano, tmp_path, kind, project_name="p", run_name="r", logger=["console", "tensorboard"])
    about = {"trackers.notes": "why", "trackers.finish_seconds": 240.0}
    status, output = run_of(values | about | {"eval_interval": -1}, tmp_path)
    assert status == 0 and "warning" not in output, output
    truth = [(row["step"], row["train/loss"]) for row in all_metrics(tmp_path) if "train/loss" in row]
    points = readers.in_tensorboard(tmp_path / "run", "train/loss")
    assert [step for step, _ in points] == [step for step, _ in truth] == list(range(1, 9))
    assert [value for _, value in points] == pytest.approx([value for _, value in truth])  # float32
    [text] = readers.texts_in_tensorboard(tmp_path / "run", "configuration")
    assert '"notes": "why"' in text and '"run_name": "r"' in text


MINIMAL = """
[data]
train_data = ["{nano}/train.jsonl"]
val_data = ["{nano}/validation.jsonl"]

[trainer.policy.model]
path = "{nano}/model"

[environment]
env_class = "{nano}/reward.py:in_ascii"
"""

SMALL = (
    "trainer.run_path", "trainer.train_batch_size", "trainer.policy_mini_batch_size", "generator.n_samples_per_prompt",
    "generator.sampling_params.max_generate_length", "generator.inference_engine.backend", "trainer.max_prompt_length",
)  # fmt: skip
"""Settings without which the run of a minimal file is too large for a test."""


def run_minimal(nano: Path, out: Path, **changes: Any) -> tuple[int, str]:
    """A file with model, data and environment, on a machine where nobody has logged in to W&B: status and output."""
    file = out / "minimal.toml"
    file.write_text(MINIMAL.format(nano=nano), encoding="utf-8")
    small = {path: value for path, value in overrides(nano, out).items() if path in SMALL}
    nowhere = {"HOME": str(out), "WANDB_API_KEY": "", "WANDB_MODE": ""}
    values = {**small, "trainer.max_training_steps": 1, **changes}
    session = RunSession(values, out, environ=nowhere, files=[str(file)])
    return session.ends(), session.said


@pytest.mark.long
def test_a_minimal_file_trains_with_the_default_logger_and_says_why_wandb_is_not_used(
    nano: Path, tmp_path: Path
) -> None:
    status, output = run_minimal(nano, tmp_path)
    assert status == 0, output
    [line] = [line for line in output.splitlines() if "wandb" in line]
    assert line.startswith("Metrics go to the console: wandb needs a key, but none is set (the default of trainer.lo")
    assert [row["step"] for row in all_metrics(tmp_path)] == [0, 1]
    assert not list((tmp_path / "run").glob("wandb*")) and not (tmp_path / "run" / "trackers").exists()


def test_the_same_file_with_wandb_written_is_refused_with_what_is_missing(nano: Path, tmp_path: Path) -> None:
    status, output = run_minimal(nano, tmp_path, **{"trainer.logger": "wandb"})
    assert status == 2 and "trainer.logger  wandb needs a key, but none is set" in output
    assert "set the variable WANDB_API_KEY, or run `wandb login`, or set trainer.logger = console" in output
    assert not (tmp_path / "run").exists()
