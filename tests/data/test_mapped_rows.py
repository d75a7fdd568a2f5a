"""Rows of tokens in Arrow files are trained on where they lie, as if they had been read into memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from skyrl.config import SFTConfig
from skyrl.data.mapped_rows import MappedRows
from skyrl.data.supervised_rows import CHECKED_TOGETHER, TokenizedRows, load_supervised
from skyrl.errors import DataError
from tests.rollout.chats import chat_tokenizer

TOKENIZER = chat_tokenizer()
ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
    {"input_ids": [5, 6], "loss_mask": [0, 1]},
    {"input_ids": list(range(4, 20)), "loss_mask": [0] * 15 + [1]},
    {"input_ids": [9, 9, 9], "loss_mask": [1, 1, 1]},
]


def load(*sources: Path, max_length: int = 1000, **settings: Any) -> TokenizedRows[Any]:
    return load_supervised(tuple(map(str, sources)), TOKENIZER, SFTConfig(**settings), max_length)


def jsonl(file: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def arrow(file: Path, rows: Sequence[Mapping[str, Any]] = ROWS, *, stream: bool = True, mask: Any = None) -> Path:
    names = list(rows[0])
    kinds = {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(mask or pa.int8())}
    table = pa.table({name: pa.array([row[name] for row in rows], kinds.get(name)) for name in names})
    open_file = pa.ipc.new_stream if stream else pa.ipc.new_file
    with open_file(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return file


def seen(rows: TokenizedRows[Any]) -> list[tuple[str, list[int], list[float]]]:
    return [(row.id, row.token_ids.tolist(), row.weights.tolist()) for row in rows.rows]


@pytest.mark.parametrize("form", ["stream", "file", "large lists", "booleans", "folder"])
def test_they_are_the_rows_that_a_copy_in_memory_has(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rows.arrow"
    if form == "folder":
        Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "folder"), num_shards=2)
        path = tmp_path / "folder"
    elif form == "booleans":
        arrow(
            path, [{**row, "loss_mask": [bool(value) for value in row["loss_mask"]]} for row in ROWS], mask=pa.bool_()
        )
    elif form == "large lists":
        table = pa.table({name: pa.array([row[name] for row in ROWS], pa.large_list(pa.int64())) for name in ROWS[0]})
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        arrow(path, stream=form == "stream")
    mapped, copied = load(path), load(jsonl(tmp_path / "rows.jsonl"))
    assert isinstance(mapped.rows, MappedRows)
    assert seen(mapped) == seen(copied)
    assert mapped.fingerprint == copied.fingerprint
    assert mapped.sizes == copied.sizes == (4,)


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
def test_long_rows_are_left_out_or_cut_as_elsewhere(tmp_path: Path, too_long: Any) -> None:
    rows = [*ROWS, {"input_ids": list(range(4, 20)), "loss_mask": [0, 0, 1] + [0] * 13}]
    sources = [arrow(tmp_path / "rows.arrow", rows), arrow(tmp_path / "more.arrow")]
    mapped = load(*sources, max_length=4, too_long=too_long)
    copied = load(jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl"), max_length=4, too_long=too_long)
    assert seen(mapped) == seen(copied)
    assert (mapped.tally.too_long, mapped.tally.cut) == (copied.tally.too_long, copied.tally.cut)
    assert mapped.sizes == copied.sizes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6], "loss_mask": [1]}, "2 input_ids have 1 loss_mask"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "no token of it is learned"),
        ({"input_ids": [5, None], "loss_mask": [1, 1]}, "not a list of whole numbers"),
        ({"input_ids": None, "loss_mask": [1, 1]}, "input_ids"),
        ({"input_ids": [], "loss_mask": []}, "input_ids are empty"),
        ({"input_ids": [5, 100_000], "loss_mask": [1, 1]}, "input_ids go from 5 to 100000"),
    ],
)
def test_a_bad_row_is_named_or_left_out_and_counted(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = arrow(tmp_path / "rows.arrow", [ROWS[0], row, ROWS[1]])
    with pytest.raises(DataError, match=r"rows\.arrow, row 1: .*" + message):
        load(file)
    rows = load(file, bad_rows="skip")
    assert [row_id for row_id, _, _ in seen(rows)] == ["0:0", "0:2"]
    assert len(rows.tally.bad_rows) == 1


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
@pytest.mark.parametrize("extra", ["labels", "attention_mask", "none"])
def test_many_rows_are_checked_together_as_each_is_alone(tmp_path: Path, too_long: Any, extra: str) -> None:
    """More than are checked at a time, two of them bad, some too long, some padded."""
    draws = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(3 * CHECKED_TOGETHER):
        ids = [draws.randrange(4, 60) for _ in range(draws.randint(2, 12))]
        row = {"input_ids": ids, "loss_mask": [0, *(1 for _ in ids[1:])]}
        padding = draws.randint(0, 2)
        if extra == "labels":
            row["labels"] = [-100, *ids[1:]]
        if extra == "attention_mask":
            row = {"input_ids": [*ids, *[0] * padding], "loss_mask": [*row["loss_mask"], *[1] * padding]}
            row["attention_mask"] = [1] * len(ids) + [0] * padding
        rows.append(row)
    rows[CHECKED_TOGETHER + 7]["loss_mask"] = [0] * len(rows[CHECKED_TOGETHER + 7]["input_ids"])
    rows[2 * CHECKED_TOGETHER] = {name: [] for name in rows[0]}
    settings: dict[str, Any] = {"max_length": 11, "too_long": too_long, "bad_rows": "skip"}
    mapped = load(arrow(tmp_path / "rows.arrow", rows), **settings)
    copied = load(jsonl(tmp_path / "rows.jsonl", rows), **settings)
    assert seen(mapped) == seen(copied) and mapped.fingerprint == copied.fingerprint
    assert (mapped.sizes, mapped.tally.too_long, mapped.tally.cut) == (
        copied.sizes,
        copied.tally.too_long,
        copied.tally.cut,
    )
    assert len(mapped.tally.bad_rows) == len(copied.tally.bad_rows) == 2


@pytest.mark.parametrize("form", ["arrow", "jsonl"])
def test_a_mask_of_another_name_is_refused(tmp_path: Path, form: str) -> None:
    rows = [{"input_ids": [5, 6], "response_mask": [0, 1]}]
    file = arrow(tmp_path / "rows.arrow", rows) if form == "arrow" else jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows\..*: the column 'response_mask' is none of labels, loss_mask"):
        load(file)


def test_a_mask_that_is_null_is_refused(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6], "loss_mask": None}
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: loss_mask is null"):
        load(jsonl(tmp_path / "rows.jsonl", [ROWS[0], row]))
    assert len(load(jsonl(tmp_path / "rows.jsonl", [{**row, "labels": [-100, 6]}])).rows) == 1


def test_chats_in_an_arrow_file_are_rendered(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [{"messages": chat}]
    assert seen(load(arrow(tmp_path / "chats.arrow", rows))) == seen(load(jsonl(tmp_path / "chats.jsonl", rows)))


@pytest.mark.parametrize("content", [b"", b"not an Arrow file at all", b"ARROW1 and nothing else"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.arrow"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.arrow cannot be read as an Arrow file"):
        load(file)


def test_a_damaged_file_is_named_or_gives_rows_of_tokens(tmp_path: Path) -> None:
    """Bytes of it are changed, or its end is cut off: nothing outside of the file is read."""
    content = arrow(tmp_path / "rows.arrow").read_bytes()
    draws = random.Random(0)
    for number in range(300):
        damaged = bytearray(content)
        for _ in range(draws.randint(1, 4)):
            damaged[draws.randrange(len(damaged))] = draws.randrange(256)
        file = tmp_path / f"{number}.arrow"
        file.write_bytes(damaged[: draws.choice([None, draws.randrange(len(damaged))])])
        with suppress(DataError):
            load(file, bad_rows="skip")


READ = """
import resource, sys
from skyrl.config import SFTConfig
from skyrl.data.supervised_rows import load_supervised
from tests.rollout.chats import chat_tokenizer
rows = load_supervised((sys.argv[1],), chat_tokenizer(), SFTConfig(), 1 << 20)
total = sum(int(rows.rows[place * 7919 % len(rows)].token_ids.sum()) for place in range(20_000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_of(file: Path) -> int:
    """Peak of resident memory, in bytes, of a process that reads all rows and then 20,000 of them at random."""
    program = [sys.executable, "-c", READ, str(file)]
    return 1024 * int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


def write_rows(file: Path, count: int) -> None:
    """`count` rows of 1,000 tokens and masks, 5,000 bytes each."""
    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    with pa.ipc.new_stream(file, schema) as writer:
        for _ in range(count // 100):
            ids = pa.array(np.random.default_rng(0).integers(4, 60, 100_000, dtype=np.int32))
            ends, ones = pa.array(range(0, 100_001, 1000), pa.int32()), pa.array(np.ones(100_000, np.int8))
            lists = [pa.ListArray.from_arrays(ends, ids), pa.ListArray.from_arrays(ends, ones)]
            writer.write_batch(pa.record_batch(lists, schema=schema))


def resident(file: Path) -> int:
    """Bytes of the file that are in the memory of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(file))]
    return 1024 * sum(
        int(line.split()[1]) for start in starts for line in lines[start : start + 6] if line.startswith("Rss:")
    )


@pytest.mark.long
def test_pages_that_were_read_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.arrow"
    write_rows(file, 2000)
    for pages, least, most in ((1 << 40, 9 << 20, 1 << 40), (1 << 20, 0, 3 << 20)):
        monkeypatch.setattr("skyrl.data.arrow_files.PAGES", pages)
        rows = load(file)
        assert sum(row.length for row in rows.rows) == 2_000_000
        assert least <= resident(file) < most


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """2 GB against 2 MB."""
    small, large = tmp_path / "small.arrow", tmp_path / "large.arrow"
    write_rows(small, 400)
    write_rows(large, 400_000)
    assert large.stat().st_size > 2_000_000_000
    assert peak_of(large) - peak_of(small) < 150 << 20
