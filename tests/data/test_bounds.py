"""Sources that were made to fill the memory or the stack end in a sentence; odd rows are rows or are named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl.data import bounds
from skyrl.data.sources import BadRow, iterate_rows, read_rows
from skyrl.errors import DataError

CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("depth", [bounds.DEEPEST + 1, 300_000])
def test_a_row_that_is_nested_deep_is_a_bad_row_with_its_place(depth: int, tmp_path: Path) -> None:
    deep = '{"prompt": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": CHAT}) + "\n" + deep + "\n")
    _, bad = iterate_rows(str(tmp_path / "a.jsonl"))
    assert (
        isinstance(bad, BadRow) and bad.reason == f"{tmp_path / 'a.jsonl'}:2 is nested deeper than 64 objects and lists"
    )
    (tmp_path / "a.json").write_text(f"[{deep}]")
    assert "nested deeper than 64" in refusal(tmp_path / "a.json")


def test_a_row_as_deep_as_allowed_is_a_row(tmp_path: Path) -> None:
    row = {"prompt": CHAT, "deep": json.loads("[" * (bounds.DEEPEST - 1) + "]" * (bounds.DEEPEST - 1))}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert read_rows(str(tmp_path / "a.jsonl")) == [row]


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.data.sources.LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_text("{" * 101)
    with pytest.raises(DataError, match=r"a.jsonl:1 is longer than 100 bytes"):
        list(iterate_rows(str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_parquet_file_that_expands_to_gigabytes_is_refused(
    dictionary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "FREE_BYTES", 1 << 20)
    table = pa.table({"prompt": ["x" * 100_000] * 200})  # 20 MB of one text
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=dictionary)
    assert (tmp_path / "a.parquet").stat().st_size < 30_000
    with pytest.raises(DataError, match="a.parquet expands to more than 500 times its size"):
        list(iterate_rows(str(tmp_path / "a.parquet")))


SMALL: dict[str, Callable[[], pa.Array]] = {
    "nulls": lambda: pa.array([[None] * 10_000] * 64),
    "booleans": lambda: pa.array([[True] * 10_000] * 64),
    "empty lists": lambda: pa.array([[[]] * 10_000] * 64, pa.list_(pa.list_(pa.int8()))),
    "null lists": lambda: pa.array([[None] * 10_000] * 64, pa.list_(pa.list_(pa.int8()))),
    "structs of nulls": lambda: pa.array([[{"a": None}] * 10_000] * 64),
    "nulls in structs of structs": lambda: pa.array([[{"a": {"b": None}}] * 10_000] * 64),
    "nulls in large lists": lambda: pa.array([[None] * 10_000] * 64, pa.large_list(pa.null())),
    "nulls in lists of one size": lambda: pa.array([[None] * 10_000] * 64, pa.list_(pa.null(), 10_000)),
    "nulls in maps": lambda: pa.array(
        [[(str(n % 2), None) for n in range(10_000)]] * 64, pa.map_(pa.string(), pa.bool_())
    ),
    "zeros": lambda: pa.array([[0] * 10_000] * 64, pa.list_(pa.int8())),
}
"""640,000 values that need no bytes, or nearly none, in a file."""


@pytest.mark.parametrize("kind", SMALL)
def test_values_without_bytes_are_counted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "FREE_BYTES", 1 << 20)
    table = pa.table({"prompt": SMALL[kind]()})
    assert bounds.size_of(table.to_batches()[0]) >= 16 * 640_000
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 5_000
    with pytest.raises(DataError, match="a.parquet expands to more than 500 times its size"):
        list(iterate_rows(str(tmp_path / "a.parquet")))


def test_part_of_a_column_counts_what_is_in_it() -> None:
    """A slice of a batch shares the buffers of the whole."""
    rows = pa.table({"a": [[(str(n), None)] for n in range(100)]}, pa.schema({"a": pa.map_(pa.string(), pa.null())}))
    batch = rows.to_batches()[0]
    assert bounds._elements(batch.column(0)) == 300
    assert bounds._elements(batch.slice(10, 5).column(0)) == 15


def test_an_ordinary_parquet_file_is_read(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "n": n, "source": "the same"} for n in range(1_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(iterate_rows(str(tmp_path / "a.parquet"))) == rows


PYARROW_ABORTS = 786
"""The first seed that damages a histogram of sizes in a Parquet file's metadata: pyarrow 26 ends the process then, in
`RowGroupMetaData.column`, because it translates no exception of C++ there."""


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 100_000), marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_files_with_bytes_changed_give_rows_or_a_sentence_with_the_path(
    suffix: str, seeds: range, tmp_path: Path
) -> None:
    file = tmp_path / f"a.{suffix}"
    rows = [{"prompt": "p", "n": str(n)} for n in range(4)]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif suffix == "csv":
        file.write_text("prompt,n\n" + "".join(f"p,{n}\n" for n in range(4)))
    else:
        lines = [json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
    content = file.read_bytes()
    for seed in seeds[: PYARROW_ABORTS - seeds.start] if suffix == "parquet" else seeds:
        rng, changed = random.Random(seed), bytearray(content)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        file.write_bytes(bytes(changed))
        assert str(file) in refusal(file), seed


def refusal(file: Path) -> str:
    """What is said about the file or its bad rows; its name where there is nothing to say."""
    try:
        reasons = [row.reason for row in iterate_rows(str(file)) if isinstance(row, BadRow)]
    except DataError as error:
        reasons = [str(error)]
    return min(reasons, key=lambda reason: str(file) in reason, default=str(file))
