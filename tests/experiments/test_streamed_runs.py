"""Runs on streamed and on stored prompts: they train as runs on loaded ones, and go on exactly where they stopped."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import compose
from skyrl.errors import ConfigError
from skyrl.tools.data_report import data_report, row_page, split_data
from tests.experiments.forked import run
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same, assert_same_files, tokens
from tests.experiments.test_kills import AHEAD
from tests.long_cases import long_except
from tests.nano_run import config, metrics, overrides, train
from tests.supervised_run import chats, pairs, write
from tests.supervised_run import train as train_supervised

pytestmark = pytest.mark.xdist_group("forked")


def in_shards(nano: Path, folder: Path) -> str:
    """The training rows of the nano model in three files."""
    folder.mkdir()
    lines = (nano / "train.jsonl").read_text().splitlines()
    for number in range(3):
        (folder / f"{number}.jsonl").write_text("\n".join(lines[number::3]))
    return str(folder / "*.jsonl")


def streamed(nano: Path, folder: Path) -> dict[str, Any]:
    return {
        "data__train_data": [in_shards(nano, folder / "rows")],
        "data__streaming": True,
        "data__shuffle_buffer_size": 5,
        "trainer__max_training_steps": 8,
    }


def assert_kills_end(nano: Path, folder: Path, changes: dict[str, Any]) -> None:
    """A whole run, and one that is killed twice and then ends."""
    status, output = run(nano, folder / "whole", **changes)
    assert status == 0, output
    for fault in (Fault(phase="backward", nth=5, delay=0.0), Fault(phase="generation", nth=2, delay=0.0)):
        status, output = run(nano, folder / "killed", fault, **changes)
        assert status == -signal.SIGKILL, output
    status, output = run(nano, folder / "killed", **changes)
    assert status == 0 and "Traceback" not in output, output


@pytest.mark.long
def test_a_run_on_a_stream_that_is_killed_ends_like_one_that_was_not(nano: Path, tmp_path: Path) -> None:
    assert_kills_end(nano, tmp_path, streamed(nano, tmp_path))
    assert_same(tmp_path / "killed", tmp_path / "whole")
    assert_same_files(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long
def test_an_asynchronous_run_on_a_stream_that_is_killed_trains_on_the_same_prompts(nano: Path, tmp_path: Path) -> None:
    assert_kills_end(nano, tmp_path, {**streamed(nano, tmp_path), **AHEAD})
    trained = [
        Counter(str(line["prompt_id"]) for line in tokens(tmp_path / name)) for name in ("killed", "whole")
    ]  # their order depends on which samples end first
    assert trained[0] == trained[1] and trained[0].total() > 0


def test_in_order_a_run_on_a_stream_is_the_run_on_loaded_rows(nano: Path, tmp_path: Path) -> None:
    in_order = {"data__shuffle": False, "data__epoch_tail": "carry", "trainer__max_training_steps": 4}
    train(nano, tmp_path / "loaded", **in_order)
    train(nano, tmp_path / "stored", **in_order, data__tokenized_path=str(tmp_path / "tokens"))
    train(nano, tmp_path / "streamed", **{**in_order, "data__epoch_tail": "drop"}, data__streaming=True)
    loaded = metrics(tmp_path / "loaded")
    assert len(loaded) >= 4 and loaded == metrics(tmp_path / "stored") == metrics(tmp_path / "streamed")


def pieces(folder: Path, kind: str) -> str:
    """32 rows in two files."""
    folder.mkdir()
    rows = chats(32) if kind == "sft" else pairs(32)
    write(folder / "0.jsonl", rows[:20])
    write(folder / "1.jsonl", rows[20:])
    return str(folder / "*.jsonl")


@pytest.mark.long
@pytest.mark.parametrize("kind", long_except(["sft", "reward_model", "preference"], "sft", "preference"))
def test_supervised_runs_on_streams_train_as_on_loaded_rows_and_resume(nano: Path, tmp_path: Path, kind: str) -> None:
    source = pieces(tmp_path / "rows", kind)
    losses: dict[str, Any] = {}
    starts: dict[str, dict[str, Any]] = {
        "loaded": {"sampler": "sequential", "num_steps": 6},
        "in order": {"sampler": "sequential", "streaming": True, "num_steps": 6},
        "whole": {"streaming": True, "shuffle_buffer_size": 6, "num_steps": 6, "ckpt_interval": 2},
        "parts": {"streaming": True, "shuffle_buffer_size": 6, "num_steps": 3, "ckpt_interval": 2},
        "parts ": {"streaming": True, "shuffle_buffer_size": 6, "num_steps": 6, "ckpt_interval": 2},
    }
    for name, changes in starts.items():
        folder = tmp_path / name.strip()
        folder.mkdir(exist_ok=True)
        records = train_supervised(nano, folder, kind, deterministic=True, **{"train_datasets": (source,), **changes})
        losses[name] = [record.get("train/loss") for record in records]
    assert losses["loaded"] == losses["in order"] and losses["whole"] == losses["parts "]
    assert losses["whole"] != losses["in order"] and len(losses["whole"]) == 7


def test_streamed_data_is_inspected_whole(nano: Path, tmp_path: Path) -> None:
    streamed_run = config(nano, tmp_path, **streamed(nano, tmp_path))
    loaded = config(nano, tmp_path)
    one, other = (data_report(run).sources[0] for run in (streamed_run, loaded))
    assert (one.used, one.tokens, one.columns, one.too_long) == (
        other.used,
        other.tokens,
        other.columns,
        other.too_long,
    )
    assert one.used == len((nano / "train.jsonl").read_text().splitlines()) - one.too_long


def test_streamed_data_is_shown_and_split_as_loaded_data_is(nano: Path, tmp_path: Path) -> None:
    streamed_run = config(nano, tmp_path, **streamed(nano, tmp_path))
    loaded = config(nano, tmp_path, data__train_data=list(streamed_run.data.train_data))
    assert row_page(streamed_run, 0, 9) == row_page(loaded, 0, 9) != row_page(loaded, 0, 0)
    halves = [split_data(run, tmp_path / name, 0.4, 0) for run, name in ((streamed_run, "one"), (loaded, "two"))]
    assert halves[0].rows == halves[1].rows
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_stream_without_an_end_is_refused(nano: Path, tmp_path: Path) -> None:
    values = overrides(nano, tmp_path, **{**streamed(nano, tmp_path), "trainer__max_training_steps": None})
    with pytest.raises(ConfigError, match="the number of streamed prompts is not known in advance"):
        compose([], values)
