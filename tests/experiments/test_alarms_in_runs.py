"""Alarms in runs of the nano model: what they write, how they end a run, and what a resumed run raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.nano_run import all_metrics, train

WATCH = [{"name": "often", "metric": "reward/avg_raw_reward", "when": "above", "threshold": 0.1, "window": 2}]
STALLS = [{"metric": "eval/all/avg_score", "when": "stalls", "window": 2, "threshold": 2.0, "action": "stop"}]
"""No evaluation is better than another by 2: the third one ends the run."""


def written(out: Path) -> list[dict[str, Any]]:
    file = out / "run" / "alarms.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def names(out: Path) -> list[tuple[int, str]]:
    """Steps and names of the alarms in `alarms.jsonl`, but for those that depend on the machine's speed."""
    return [(alarm["step"], alarm["name"]) for alarm in written(out) if alarm["name"] != "throughput_halved"]


@pytest.mark.long
def test_a_resumed_run_raises_exactly_what_the_undisturbed_one_raises(nano: Path, tmp_path: Path) -> None:
    watching: dict[str, Any] = {"trainer__alarms": WATCH, "trainer__deterministic": True}
    train(nano, tmp_path / "whole", **watching, trainer__ckpt_interval=1)
    for steps in (3, 6):
        train(nano, tmp_path / "parts", **watching, trainer__ckpt_interval=1, trainer__max_training_steps=steps)
    assert names(tmp_path / "parts") == names(tmp_path / "whole")
    assert {name for _, name in names(tmp_path / "whole")} >= {"often", "truncated_answers"}
    logged = [(r["step"], key) for r in all_metrics(tmp_path / "whole") for key in r if key == "alarm/often"]
    assert logged == [(step, f"alarm/{name}") for step, name in names(tmp_path / "whole") if name == "often"]


@pytest.mark.long
def test_early_stopping_finishes_the_run_and_keeps_it_finished(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stops: dict[str, Any] = {"trainer__alarms": STALLS, "trainer__eval_interval": 1, "trainer__ckpt_interval": 5}
    assert train(nano, tmp_path, **stops).folder.model.exists()
    assert [record["step"] for record in all_metrics(tmp_path)] == [0, 1, 2], "evaluated three times"
    [last] = [alarm for alarm in written(tmp_path) if alarm["action"] == "stop"]
    assert (last["step"], last["name"]) == (2, "eval/all/avg_score")
    assert (tmp_path / "checkpoints" / "global_step_2").is_dir(), "saved although no checkpoint was due"
    assert "The run ends with this step." in capsys.readouterr().err
    train(nano, tmp_path, **stops)
    assert "ended this run at step 2; change the alarm to continue" in capsys.readouterr().err
    assert len(all_metrics(tmp_path)) == 3, "nothing was trained"
    train(nano, tmp_path, **{**stops, "trainer__alarms": []})
    assert [record["step"] for record in all_metrics(tmp_path)] == list(range(7))


@pytest.mark.long
def test_a_negative_entropy_bonus_collapses_the_entropy_and_is_noticed(nano: Path, tmp_path: Path) -> None:
    ill: dict[str, Any] = {
        "trainer__algorithm__use_entropy_loss": True,
        "trainer__algorithm__entropy_loss_coef": -1.0,
        "trainer__epochs": 2,
        "trainer__eval_interval": -1,
        "trainer__eval_before_train": False,
        "data__val_data": [],
    }
    train(nano, tmp_path, **ill)
    assert "entropy_collapse" in {name for _, name in names(tmp_path)}


def test_an_alarm_that_saves_writes_a_checkpoint_where_none_is_due(nano: Path, tmp_path: Path) -> None:
    alarm = {"metric": "reward/avg_raw_reward", "when": "above", "threshold": -1.0, "window": 1, "action": "save"}
    train(nano, tmp_path, trainer__alarms=[alarm], trainer__ckpt_interval=-1, trainer__max_training_steps=2)
    assert [path.name for path in (tmp_path / "checkpoints").glob("global_step_*")] == ["global_step_1"]
