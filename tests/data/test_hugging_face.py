"""Datasets of Hugging Face's library, from folders of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from skyrl.data.sources import read_rows
from skyrl.errors import DataError

ROWS = [{"prompt": [{"role": "user", "content": text}]} for text in "ab"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def test_a_folder_of_data_files_is_a_dataset_with_its_splits(tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    for name, rows in (("train", ROWS), ("test", ROWS[:1])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert read_rows(str(folder)) == ROWS
    assert read_rows(f"{folder}:test") == ROWS[:1]
    with pytest.raises(DataError, match="letters:dev cannot be loaded: .*Unknown split"):
        read_rows(f"{folder}:dev")


def test_a_folder_that_the_library_saved_is_read_back(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(str(tmp_path / "several"))
    assert read_rows(str(tmp_path / "one")) == ROWS
    assert read_rows(f"{tmp_path / 'several'}:test") == ROWS[1:]
    with pytest.raises(DataError, match="there is no split 'dev'"):
        read_rows(f"{tmp_path / 'several'}:dev")


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="nothing cannot be loaded"):
        read_rows(str(tmp_path / "nothing"))


def test_a_name_of_too_many_parts_is_refused() -> None:
    with pytest.raises(DataError, match="`name`, `name:split` or `name:configuration:split`"):
        read_rows("owner/name:a:b:c")


def test_a_split_of_a_stored_dataset_is_the_one_that_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(DataError, match="there is no split 'test'; it has train"):
        read_rows(f"{tmp_path / 'one'}:test")
    assert read_rows(f"{tmp_path / 'one'}:train") == ROWS


@pytest.mark.parametrize("stored", [True, False])
def test_a_split_may_be_sliced(tmp_path: Path, stored: bool) -> None:
    folder = tmp_path / "letters"
    if stored:
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(folder))
    else:
        folder.mkdir()
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    assert read_rows(f"{folder}:train[:1]") == ROWS[:1]
    assert read_rows(f"{folder}:train[50%:]") == ROWS[1:]
