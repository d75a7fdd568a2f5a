"""Streamed rows: what loading reads, in an order that a state continues, from any kind of source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve

from skyrl.data.cursor import StreamCursor
from skyrl.data.data_files import DataFile
from skyrl.data.prompts import StreamedPrompts, load_prompts
from skyrl.data.row_streams import RowStream, StreamedRow, parts_of, versions
from skyrl.data.sources import BadRow, Columns, read_file, read_rows
from skyrl.errors import DataError, ResumeError
from skyrl.storage.places import storage_at
from skyrl.storage.remote_file import READ_AHEAD
from skyrl.trajectory import Prompt
from tests.checkpoint.object_store import BUCKET, ObjectStore
from tests.rollout.chats import chat_tokenizer

TOKENIZER = chat_tokenizer()

SETTINGS: dict[str, Any] = {
    "env_class": "gsm8k",
    "max_prompt_length": 30,
    "chat_template_kwargs": {},
    "columns": Columns(),
    "skip_bad_rows": True,
    "refuses": None,
    "rendered": True,
}


def row(number: int) -> dict[str, Any]:
    content = str(number) if number % 7 else "9" * 60
    return {"prompt": [{"role": "user", "content": content}], "number": number}


def shards(folder: Path, suffix: str = "jsonl") -> str:
    """Three files of 20, 21 and 22 rows; the second has a column more."""
    start = 0
    for index, count in enumerate((20, 21, 22)):
        more = {"level": index} if index == 1 else {}
        rows = [{**row(number), **more} for number in range(start, start + count)]
        if suffix == "jsonl":
            (folder / f"rows-{index}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / f"rows-{index}.parquet", row_group_size=6)
        start += count
    return str(folder / f"rows-*.{suffix}")


def saved(folder: Path) -> str:
    datasets.Dataset.from_list([row(number) for number in range(63)]).save_to_disk(folder / "saved")
    return str(folder / "saved")


def of_a_folder(folder: Path) -> str:
    (folder / "folder").mkdir()
    (folder / "folder" / "train.jsonl").write_text("\n".join(json.dumps(row(number)) for number in range(63)))
    return str(folder / "folder")


SOURCES: dict[str, Callable[[Path], str]] = {
    "jsonl": shards,
    "parquet": lambda folder: shards(folder, "parquet"),
    "saved": saved,
    "folder": of_a_folder,
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return SOURCES[request.param](tmp_path)


def stream(sources: Sequence[str], *, buffer: int = 8, seed: int | None = 1) -> RowStream:
    return RowStream(parts_of(sources), buffer=buffer, seed=seed)


def numbers(rows: RowStream, count: int) -> list[int]:
    return [streamed.row["number"] for streamed in drawn(rows, count) if not isinstance(streamed.row, BadRow)]


def drawn(rows: RowStream, count: int) -> Iterator[StreamedRow]:
    return (rows.draw() for _ in range(count))


def test_in_order_a_pass_is_what_loading_reads(source: str) -> None:
    read = [record for record in read_rows(source) if not isinstance(record, BadRow)]
    assert [record["number"] for record in read] == list(range(63))
    assert [streamed.row for streamed in drawn(stream([source], seed=None), 63)] == read


def test_shuffled_passes_have_each_row_once_in_other_orders(source: str) -> None:
    rows = stream([source])
    first, second = numbers(rows, 63), numbers(rows, 63)
    assert sorted(first) == sorted(second) == list(range(63))
    assert first != second
    assert first != list(range(63)) and rows.passes == 1


@pytest.mark.sampled(6)
def test_a_stream_goes_on_where_another_stopped(source: str) -> None:
    expected = numbers(stream([source, source]), 300)
    for stop in (0, 1, 7, 8, 9, 63, 126, 127, 200):
        stopped, resumed = stream([source, source]), stream([source, source])
        numbers(stopped, stop)
        resumed.load_state(json.loads(json.dumps(stopped.state())))
        assert numbers(resumed, 300 - stop) == expected[stop:]


def cursor(source: str, fingerprint: str = "", **changes: Any) -> StreamCursor[Prompt]:
    return StreamCursor(stream([source]), StreamedPrompts(TOKENIZER, **{**SETTINGS, **changes}), 5, fingerprint)


def test_streamed_prompts_are_loaded_prompts_row_for_row(source: str) -> None:
    loaded = load_prompts([source], TOKENIZER, **SETTINGS)
    assert loaded.too_long == 9 and len(loaded) == 54
    make = StreamedPrompts(TOKENIZER, **SETTINGS)
    prompts = [prompt for prompt, _ in map(make, drawn(stream([source], seed=None), 63)) if prompt is not None]
    assert [evolve(prompt, id="") for prompt in prompts] == [evolve(prompt, id="") for prompt in loaded.prompts]
    assert len({prompt.id for prompt in prompts}) == 54


def test_batches_cross_passes_and_count_what_they_leave_out(tmp_path: Path) -> None:
    stream_cursor = cursor(shards(tmp_path))
    batches = [stream_cursor.take() for _ in range(22)]
    of_a_pass = [prompt.extras["number"] for batch in batches for prompt in batch][:54]
    assert sorted(of_a_pass) == [number for number in range(63) if number % 7]
    assert (
        stream_cursor.epoch,
        stream_cursor.epoch_after(10),
        stream_cursor.epoch_after(11),
        stream_cursor.epoch_after(22),
    ) == (2, 0, 1, 2)
    assert 18 <= stream_cursor.metrics()["data/rows_too_long"] <= 27
    resumed = cursor(shards(tmp_path))
    partial = cursor(shards(tmp_path))
    for _ in range(13):
        partial.take()
    resumed.load_state(json.loads(json.dumps(partial.state())))
    assert [resumed.take() for _ in range(9)] == batches[13:] and resumed.metrics() == stream_cursor.metrics()
    assert resumed.state() == stream_cursor.state()
    assert resumed.of_stored(json.loads(json.dumps(resumed.as_stored(batches[0])))) == list(batches[0])


def test_a_bad_row_ends_the_run_unless_it_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row(1))}\n" * 3 + '{"prompt": 1}\n')
    skipping, stopping = (cursor(str(tmp_path / "a.jsonl"), skip_bad_rows=skips) for skips in (True, False))
    skipping.take()
    assert skipping.metrics() == {"data/rows_bad": 1.0}
    with pytest.raises(DataError, match=r"a.jsonl, row 3: prompt is 1, not a list .*data.bad_rows = skip"):
        stopping.take()


def test_data_of_which_no_row_can_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row(7)))
    with pytest.raises(DataError, match="no row of the sources can be trained on .*rows_too_long"):
        cursor(str(tmp_path / "a.jsonl")).take()
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no source contains rows"):
        cursor(str(tmp_path / "b.jsonl")).take()


def test_a_cursor_does_not_go_on_through_other_data(tmp_path: Path) -> None:
    source = shards(tmp_path)
    before = versions([source])
    assert versions([source]) == before
    (tmp_path / "rows-1.jsonl").write_text((tmp_path / "rows-1.jsonl").read_text().replace("2", "3"))
    assert versions([source]) != before
    with pytest.raises(ResumeError, match="the streamed data is not what it was"):
        cursor(source, "now").load_state(cursor(source, "then").state())
    with pytest.raises(ResumeError, match="data.streaming = false"):
        cursor(source).load_state({"batches_taken": 3, "prompts": ""})


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_of_different_kinds_are_refused_with_their_files(tmp_path: Path, suffix: str) -> None:
    source = shards(tmp_path, suffix)
    other = {**row(1), "number": "one"}
    if suffix == "jsonl":
        (tmp_path / "rows-2.jsonl").write_text(json.dumps(other))
    else:
        pq.write_table(pa.Table.from_pylist([other]), tmp_path / "rows-2.parquet")
    for read in (lambda: read_rows(source), lambda: parts_of([source])):
        with pytest.raises(
            DataError, match=r"column number has values of the kind text in .*rows-2.* and number in .*"
        ):
            read()


def test_a_prompt_may_be_the_json_text_of_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1"}]
    rows = [{"prompt": json.dumps(chat)}, {"prompt": chat}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, other = load_prompts([str(tmp_path / "a.jsonl")], TOKENIZER, **SETTINGS).prompts
    assert (one.messages, one.token_ids) == (other.messages, other.token_ids)
    texts = {"columns": Columns(prompt="question")}
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps({"question": text}) for text in ("[1, 2]", json.dumps(chat)))
    )
    plain, parsed = load_prompts([str(tmp_path / "b.jsonl")], TOKENIZER, **{**SETTINGS, **texts}).prompts
    assert plain.messages == ({"role": "user", "content": "[1, 2]"},) and parsed.messages == one.messages


@pytest.mark.long
def test_an_object_store_is_read_as_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("jsonl", "parquet"):
        shards(tmp_path, suffix)
    with ObjectStore() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        storage = storage_at(f"s3://{BUCKET}/data")
        for file in sorted(tmp_path.iterdir()):
            storage.write(file.name, [file.read_bytes()])
        for suffix in ("jsonl", "parquet"):
            remote = f"s3://{BUCKET}/data/rows-*.{suffix}"
            assert read_rows(remote) == read_rows(str(tmp_path / f"rows-*.{suffix}"))
            assert numbers(stream([remote]), 80) == numbers(stream([str(tmp_path / f"rows-*.{suffix}")]), 80)
        assert len(parts_of([f"s3://{BUCKET}/data"])) == 6
        lines = DataFile(f"s3://{BUCKET}/data/large.jsonl")
        storage.write("large.jsonl", [b'{"prompt": 1}\n' * (READ_AHEAD // 4)])
        rows = read_file(lines)
        next(rows)
        storage.write("large.jsonl", [b'{"prompt": 2}\n' * (READ_AHEAD // 4)])
        with pytest.raises(
            DataError, match=r"large\.jsonl cannot be read: large\.jsonl was replaced while it was read"
        ):
            list(rows)
        storage.remove("large.jsonl")
        before = versions([f"s3://{BUCKET}/data"])
        storage.write("rows-0.jsonl", [b"{}"])
        assert versions([f"s3://{BUCKET}/data"]) != before
        with pytest.raises(DataError, match="there is no data file s3://.*none.*"):
            parts_of([f"s3://{BUCKET}/none-*.jsonl"])
        with pytest.raises(DataError, match="none.jsonl cannot be read"):
            numbers(stream([f"s3://{BUCKET}/none.jsonl"]), 1)
