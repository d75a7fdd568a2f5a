"""Prompts on disk: those that memory would hold, made once, and read when they are drawn."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl.data.cursor import PromptCursor
from skyrl.data.prompts import PromptDataset, load_prompts
from skyrl.data.stored_prompts import PromptStore
from skyrl.errors import DataError, ResumeError
from tests.rollout.chats import chat_tokenizer

TOKENIZER = chat_tokenizer()


class Counted:
    """A tokenizer that counts how often it tokenizes."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return TOKENIZER(*arguments, **options)


def row(number: int, **columns: Any) -> dict[str, Any]:
    content = "9" * (40 if number % 7 == 0 else number % 5 + 1)
    tools = [{"type": "function", "function": {"name": "add"}}] if number % 3 == 0 else None
    return {"prompt": [{"role": "user", "content": content}], "number": number, "names": tools, **columns}


def sources(folder: Path, rows: int = 2500) -> list[str]:
    (folder / "one.jsonl").write_text("\n".join(json.dumps(row(number)) for number in range(rows)) + "\n{\n")
    columns = {"when": datetime.datetime(2026, 1, 2), "raw": b"\x00\xff", "data_source": "two"}
    pq.write_table(pa.Table.from_pylist([row(number, **columns) for number in range(30)]), folder / "two.parquet")
    return [str(folder / "one.jsonl"), str(folder / "two.parquet")]


def load(paths: list[str], tokenizer: Any = TOKENIZER, *, path: Path | None = None, **changes: Any) -> PromptDataset:
    settings: dict[str, Any] = {"env_class": "gsm8k", "max_prompt_length": 30, "skip_bad_rows": True, **changes}
    store = None if path is None else PromptStore(path=str(path), settings=settings)
    return load_prompts(paths, tokenizer, **settings, store=store)


def test_prompts_on_disk_are_those_in_memory_and_are_made_once(tmp_path: Path) -> None:
    paths, tokenizer = sources(tmp_path), Counted()
    in_memory = load(paths)
    stored = load(paths, tokenizer, path=tmp_path / "store")
    calls = tokenizer.calls
    reopened = load(paths, tokenizer, path=tmp_path / "store")
    assert tokenizer.calls == calls > 1
    for loaded in (stored, reopened):
        assert tuple(loaded.prompts) == in_memory.prompts
        assert (loaded.too_long, loaded.bad_rows, loaded.sizes) == (
            in_memory.too_long,
            in_memory.bad_rows,
            in_memory.sizes,
        )
        assert (loaded.fingerprint, loaded.facts) == (in_memory.fingerprint, in_memory.facts)
    assert in_memory.too_long == 363 and len(in_memory.bad_rows) == 1


@pytest.mark.parametrize("change", [{"max_prompt_length": 20}, {"env_class": "other"}, {"skip_bad_rows": False}])
def test_other_settings_and_other_files_are_read_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    paths = sources(tmp_path, 50)[1:]
    load(paths, path=tmp_path / "store")
    assert tuple(load(paths, path=tmp_path / "store", **change).prompts) == load(paths, **change).prompts
    pq.write_table(pa.Table.from_pylist([row(1)]), paths[0])
    assert len(load(paths, path=tmp_path / "store")) == 1


def test_a_cursor_over_stored_prompts_takes_the_same_and_finds_them_by_id(tmp_path: Path) -> None:
    paths = sources(tmp_path, 100)
    in_memory, stored = load(paths), load(paths, path=tmp_path / "store")
    one, other = (
        PromptCursor(dataset.prompts, 8, seed=3, fingerprint=dataset.fingerprint, parts=dataset.facts.parts)
        for dataset in (in_memory, stored)
    )
    for _ in range(20):
        assert one.take() == other.take()
    assert one.state() == other.state()
    ids = [prompt.id for prompt in other.take()]
    assert one.of_stored(ids) == other.of_stored(ids)
    with pytest.raises(KeyError, match="0:7"):  # it is too long
        other.of_stored(["0:7"])
    fewer = load(paths[1:])
    third = PromptCursor(fewer.prompts, 8, seed=3, fingerprint=fewer.fingerprint)
    with pytest.raises(ResumeError, match="There were 110 prompts, and now there are 25"):
        third.load_state(one.state())


def test_a_column_that_cannot_be_stored_is_named_with_its_row(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": [[{"role": "user", "content": "1"}]], "x": [datetime.timedelta(1)]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"row 0:0 cannot be stored \(data.tokenized_path\).*timedelta"):
        load([str(tmp_path / "a.parquet")], path=tmp_path / "store")
