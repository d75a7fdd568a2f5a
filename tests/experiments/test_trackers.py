"""A run that is killed and resumed is one run in every tracker, with each of its steps once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.forked import run
from tests.experiments.phases import Fault
from tests.nano_run import all_metrics
from tests.tracking import readers

pytestmark = pytest.mark.xdist_group("forked")

TRACKED: dict[str, Any] = {
    "trainer__logger": ["console", "tensorboard", "wandb"],
    "trainer__trackers": {"sample_rows": 2, "wandb": {"mode": "offline"}},
    "trainer__ckpt_interval": 5,
}


def test_a_run_that_is_killed_and_resumed_is_one_run_in_each_tracker(nano: Path, tmp_path: Path) -> None:
    in_step_eight = Fault(phase="optimizer", nth=15)
    status, said = run(nano, tmp_path, in_step_eight, **TRACKED)
    assert status == -signal.SIGKILL, said
    status, said = run(nano, tmp_path, **TRACKED)
    assert status == 0 and "warning" not in said, said
    folder = tmp_path / "run"
    truth = [(row["step"], row[readers.METRIC]) for row in all_metrics(tmp_path) if row["step"]]
    assert [step for step, _ in truth] == list(range(1, 13))
    shown = readers.in_tensorboard(folder)
    assert [step for step, _ in shown] == list(range(1, 13))
    assert [value for _, value in shown] == pytest.approx([value for _, value in truth])  # float32
    assert readers.in_wandb(folder) == truth
