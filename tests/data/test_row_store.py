"""Tokenized rows on disk: the same rows, tokenized once, and never all in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.config import RewardModelConfig, SFTConfig
from skyrl.config.settings.distillation import SFTDistillationConfig
from skyrl.data.supervised_rows import RowReader, load_preferences, load_supervised, reading_settings
from skyrl.errors import DataError
from tests.rollout.chats import chat_tokenizer
from tests.supervised_run import chats, pairs, write

TOKENIZER = chat_tokenizer()


class Counted:
    """A tokenizer that counts what it is asked to read."""

    def __init__(self) -> None:
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __len__(self) -> int:
        return len(TOKENIZER)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.reads += 1
        ids: list[int] = TOKENIZER.encode(text, **options)
        return ids


def test_rows_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    weighted = [
        {"messages": [question, {**answer, "weight": 0.3}]}
        for question, answer in (row["messages"] for row in chats(2))
    ]
    sources = [
        write(tmp_path / "one.jsonl", [*weighted, *chats(5)]),
        write(tmp_path / "two.jsonl", [*chats(3, seed=1), {"x": 1}]),
    ]
    settings: dict[str, Any] = {"bad_rows": "skip", "too_long": "truncate"}
    in_memory = load_supervised(sources, TOKENIZER, SFTConfig(**settings), 27)
    stored = load_supervised(sources, TOKENIZER, SFTConfig(tokenized_path=str(tmp_path / "store"), **settings), 27)
    reopened = load_supervised(sources, TOKENIZER, SFTConfig(tokenized_path=str(tmp_path / "store"), **settings), 27)
    assert in_memory.tally == stored.tally == reopened.tally and in_memory.tally.cut > 0
    assert in_memory.fingerprint == stored.fingerprint == reopened.fingerprint
    for one, other in zip(in_memory.rows, reopened.rows, strict=True):
        assert (one.id, one.token_ids.tolist(), one.weights.tolist()) == (
            *(other.id, other.token_ids.tolist(), other.weights.tolist()),
        )
    assert [round(float(row.weights.max()), 6) for row in reopened.rows[:3]] == [0.3, 0.3, 1.0]
    assert [row.id for row in reopened.rows[-2:]] == ["1:1", "1:2"] and reopened.rows[-1].id == "1:2"


def test_pairs_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    source = write(tmp_path / "pairs.jsonl", [{**pair, "margin": 0.5} for pair in pairs(4)])
    in_memory = load_preferences([source], TOKENIZER, RewardModelConfig(), 99)
    stored = load_preferences([source], TOKENIZER, RewardModelConfig(tokenized_path=str(tmp_path / "store")), 99)
    assert in_memory.fingerprint == stored.fingerprint
    for one, other in zip(in_memory.rows, stored.rows, strict=True):
        assert (one.chosen.tolist(), one.rejected.tolist()) == (other.chosen.tolist(), other.rejected.tolist())
        assert one.margin == other.margin == 0.5


def test_what_is_there_is_not_tokenized_again_and_what_has_changed_is(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", chats(5))
    run = SFTConfig(tokenized_path=str(tmp_path / "store"))
    reads = []
    for change in ("nothing", "nothing", "the file", "the template", "what is learned"):
        if change == "the file":
            write(tmp_path / "rows.jsonl", chats(6))
        if change == "the template":
            run = SFTConfig(tokenized_path=run.tokenized_path, chat_template_kwargs={"a": 1})
        if change == "what is learned":
            run = SFTConfig(tokenized_path=run.tokenized_path, train_on_what="all_assistant_messages")
        counted: Any = Counted()
        load_supervised([source], counted, run, 99)
        reads.append(counted.reads > 0)
    assert reads == [True, False, True, True, True]
    assert len(list((tmp_path / "store").iterdir())) == 4


def test_rows_that_stop_leave_nothing_behind(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [*chats(2), {"x": 1}])
    run = SFTConfig(tokenized_path=str(tmp_path / "store"))
    with pytest.raises(DataError, match="row 2: it has neither messages"):
        load_supervised([source], TOKENIZER, run, 99)
    assert list((tmp_path / "store").iterdir()) == []


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", chats(5))
    run = SFTConfig(tokenized_path=str(tmp_path / "store"))
    load_supervised([source], TOKENIZER, run, 99)
    (folder,) = (tmp_path / "store").iterdir()
    os.truncate(folder / "rows.bin", 10)
    with pytest.raises(DataError, match="is damaged: delete it"):
        load_supervised([source], TOKENIZER, run, 99)
    (folder / "about.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read .*: delete it"):
        load_supervised([source], TOKENIZER, run, 99)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = SFTConfig(tokenized_path=str(tmp_path / "file" / "store"))
    with pytest.raises(DataError, match="tokenized_path = .* cannot be written"):
        load_supervised([write(tmp_path / "rows.jsonl", chats(2))], TOKENIZER, run, 99)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_few_rows_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Of 3,000 rows, those alive at once while they are written; a parquet file is read a thousand rows at a time."""
    source = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        write(source, [{"text": "ab"}] * 3000)
    elif suffix == "csv":
        source.write_text("text\n" + "ab\n" * 3000)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([{"text": "ab"}] * 3000), source)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    unwatched = RowReader.rows

    def watched(reader: RowReader[Any], found_in: Any = None) -> Any:
        nonlocal most
        for row in unwatched(reader, found_in):
            alive.add(row)
            most = max(most, len(alive))
            yield row

    monkeypatch.setattr(RowReader, "rows", watched)
    run = SFTConfig(tokenized_path=str(tmp_path / "store"))
    assert len(load_supervised([str(source)], TOKENIZER, run, 99)) == 3000
    assert most <= 3


TRAIN_AND_MEASURE = """
import json, resource, sys
from pathlib import Path
from tests.supervised_run import train
nano, folder, source, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
found = train(
    nano, folder, train_datasets=(source,), tokenized_path=str(folder / "store"), max_length=48, too_long="truncate",
    num_steps=steps, ckpt_interval=1,
)
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [each["step"] for each in found]]))
"""


@pytest.mark.long
def test_five_gigabytes_of_rows_train_within_one_gigabyte_and_resume_at_their_row(nano: Path, tmp_path: Path) -> None:
    import json

    source = tmp_path / "rows.jsonl"
    line = json.dumps({"input_ids": [65 + number % 26 for number in range(12_500)]}).encode() + b"\n"
    with source.open("wb") as file:
        while file.tell() < 5 << 30:
            file.write(line * 100)
    for steps in (1, 2):
        words = [sys.executable, "-c", TRAIN_AND_MEASURE, str(nano), str(tmp_path), str(source), str(steps)]
        result = subprocess.run(words, capture_output=True, text=True, check=True)
        kilobytes, trained = json.loads(result.stdout.splitlines()[-1])
        assert kilobytes < 1 << 20 and trained == list(range(steps + 1))
    source.unlink()


def test_settings_of_a_teacher_tokenize_again_only_what_they_change() -> None:
    stored = SFTDistillationConfig(stored=True)
    same = [SFTDistillationConfig(), SFTDistillationConfig(teacher_path="m", coef=0.5, top_k=8)]
    assert all(
        reading_settings(SFTConfig(distillation=distillation)) == reading_settings(SFTConfig()) for distillation in same
    )
    read = [
        reading_settings(SFTConfig(distillation=distillation)) for distillation in (stored, evolve(stored, coef=0.5))
    ]
    assert read[0] == read[1] != reading_settings(SFTConfig())
    assert read[0] != reading_settings(SFTConfig(distillation=evolve(stored, top_k=8)))
