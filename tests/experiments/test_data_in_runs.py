"""What runs make of their data: mixtures, bad rows, the ends of epochs, and where they go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import DataError, ResumeError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs.inputs import check_data
from tests.nano_run import config, metrics, train


def more(folder: Path, answer: str = "x") -> Path:
    """Six rows, and one that is none."""
    row = {"prompt": [{"role": "user", "content": "z"}], "reward_spec": {"ground_truth": answer}}
    file = folder / "more.jsonl"
    file.write_text((json.dumps(row) + "\n") * 6 + "{oops\n", encoding="utf-8")
    return file


def mixed(nano: Path, out: Path, **changes: Any) -> list[str]:
    """The prompts of each step of a run of 30 prompts, two epochs, in batches of 7."""
    out.mkdir(exist_ok=True)
    sources = [str(nano / "train.jsonl"), str(more(out.parent))]
    common: dict[str, Any] = {
        "data__train_data": sources,
        "data__train_weights": [1.0, 1.0],
        "data__bad_rows": "skip",
        "data__epoch_tail": "carry",
        "trainer__epochs": 2,
        "trainer__train_batch_size": 7,
        "trainer__policy_mini_batch_size": 7,
        "trainer__micro_train_batch_size_per_gpu": 7,
        "trainer__eval_interval": -1,
        "trainer__eval_before_train": False,
    }
    train(nano, out, **(common | changes))
    lines = (out / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    return [f"{record['step']} {record['prompt_id']}" for record in map(json.loads, lines) if record["sample"] == 0]


@pytest.mark.long
def test_a_mixture_goes_on_exactly_and_says_what_is_left_out(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted = mixed(nano, tmp_path / "whole")
    assert len(uninterrupted) == 8 * 7
    assert sum(" 1:" in prompt for prompt in uninterrupted[:30]) == 15  # half of the first epoch, of a source of six
    stderr = capsys.readouterr().err
    assert "1 training row is bad and left out (data.bad_rows), the first:" in stderr
    assert "more.jsonl:7 is not JSON" in stderr
    assert "4 training prompts, the last ones of the last epoch, do not fill a batch" in stderr
    mixed(nano, tmp_path / "resumed", trainer__max_training_steps=4)
    assert mixed(nano, tmp_path / "resumed") == uninterrupted


@pytest.mark.long
def test_what_epochs_leave_out_is_in_the_metrics_and_other_labels_are_other_data(nano: Path, tmp_path: Path) -> None:
    dropping: dict[str, Any] = {"data__epoch_tail": "drop", "data__train_weights": None}
    mixed(nano, tmp_path / "run", **dropping, trainer__max_training_steps=6)
    assert [row.get("data/prompts_left_out", 0) for row in metrics(tmp_path / "run") if row["step"]] == [0] * 3 + [
        2
    ] * 3
    more(tmp_path, answer="y")
    sources = [str(nano / "train.jsonl"), str(tmp_path / "more.jsonl")]
    with pytest.raises(ResumeError, match="the training data is not what it was"):
        train(
            nano,
            tmp_path / "run",
            **(dropping | {"data__bad_rows": "skip", "data__train_data": sources}),
            trainer__epochs=2,
            trainer__train_batch_size=7,
            trainer__policy_mini_batch_size=7,
            trainer__micro_train_batch_size_per_gpu=7,
            trainer__eval_interval=-1,
            trainer__eval_before_train=False,
        )


def reported(nano: Path, folder: Path, row: dict[str, Any], capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    """What is reported about four such rows."""
    file = folder / "rows.jsonl"
    file.write_text((json.dumps({"prompt": [{"role": "user", "content": "z"}], **row}) + "\n") * 4, encoding="utf-8")
    sources = {"data__train_data": [str(file)], "data__val_data": [str(file)]}
    experiment = BasePPOExp(config(nano, folder, **sources, **changes))
    check_data(experiment.cfg, experiment.train_dataset, None)
    return capsys.readouterr().err


def test_an_environment_that_no_row_is_played_in_is_reported(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = reported(nano, tmp_path, {"env_class": "gsm8k", "reward_spec": {"ground_truth": "4"}}, capsys)
    assert report.endswith("in_ascii has no effect: every row names its own (gsm8k)\n")
    assert reported(nano, tmp_path, {"reward_spec": {"ground_truth": "4"}}, capsys) == ""


def test_an_answer_column_that_no_row_needs_is_reported(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, own = {"answer": "They are #### 4"}, {"reward_spec": {"ground_truth": "5"}}
    report = reported(nano, tmp_path, own, capsys, data__answer_column="answer")
    assert report == "data.answer_column = answer has no effect: every row has a reward_spec of its own\n"
    assert reported(nano, tmp_path, answers, capsys, data__answer_column="answer") == ""
    with pytest.raises(DataError, match=r"row 0 has two ground truths: .* = '5' and answer .data.answer_column. = '4'"):
        reported(nano, tmp_path, {**answers, **own}, capsys, data__answer_column="answer")


def with_and_without_a_ground_truth(folder: Path) -> str:
    file = folder / "rows.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": "z"}], "reward_spec": {"ground_truth": truth}} for truth in "abcdef"
    ]
    rows += [{"prompt": [{"role": "user", "content": "z"}]}] * 2
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_a_row_without_the_ground_truth_that_the_reward_asks_for_stops_the_run(nano: Path, tmp_path: Path) -> None:
    rows = with_and_without_a_ground_truth(tmp_path)
    with pytest.raises(DataError) as raised:
        BasePPOExp(config(nano, tmp_path, data__train_data=[rows])).get_train_dataset()
    first, second = str(raised.value).splitlines()
    assert first.startswith(f"{rows}, row 6 has no ground_truth, which ")
    assert first.endswith("needs (1 more row is bad); data.bad_rows = skip leaves such rows out")
    assert second.startswith(f"  {rows}, row 7 has no ground_truth, which ")


def test_rows_without_the_ground_truth_that_the_reward_asks_for_are_left_out_and_counted(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = with_and_without_a_ground_truth(tmp_path)
    experiment = BasePPOExp(config(nano, tmp_path, data__train_data=[rows], data__bad_rows="skip"))
    check_data(experiment.cfg, experiment.train_dataset, None)
    assert [prompt.extras["reward_spec"]["ground_truth"] for prompt in experiment.train_dataset.prompts] == [*"abcdef"]
    stderr = capsys.readouterr().err
    assert "2 training rows are bad and left out (data.bad_rows), the first:" in stderr
    assert f"\n  {rows}, row 6 has no ground_truth, which " in stderr
