"""Buckets at addresses whose paths are absolute."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl.checkpoint.store import CheckpointStore
from skyrl.data.data_files import DataFile, versions_of
from skyrl.data.row_streams import versions
from skyrl.data.sources import iterate_rows
from skyrl.storage.places import READ_AHEAD, opened, storage_at
from tests.checkpoint.faulty import checkpoint
from tests.checkpoint.object_store import BUCKET, ObjectStore


def test_a_folder_of_an_absolute_path_is_listed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("text")
    bucket = storage_at(f"file://{tmp_path}")
    assert (bucket.names(), bucket.names("inner"), bucket.names("missing")) == (["inner"], ["file"], [])


def test_what_is_removed_or_missing_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("text")
    bucket = storage_at(f"file://{tmp_path}")
    bucket.remove("inner")
    bucket.remove("inner")
    assert bucket.names() == []


def test_a_file_takes_one_request_for_what_is_known_of_it_and_one_for_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, content = f"s3://{BUCKET}/data", b'{"a": 1}\n' * (READ_AHEAD // 6)
    pq.write_table(pa.table({"a": range(9)}), tmp_path / "rows.parquet")
    with ObjectStore() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)

        def asks(*methods: str) -> bool:
            requests, server.requests = server.requests, []
            return requests == [*methods]

        storage = storage_at(folder)
        storage.write("rows.jsonl", [content])
        storage.write("rows.parquet", [(tmp_path / "rows.parquet").read_bytes()])
        storage.write("none.jsonl", [b""])
        server.requests.clear()
        with opened(f"{folder}/rows.jsonl") as file:
            assert b"".join(file) == content
        assert asks("HEAD", "GET", "GET")
        with opened(f"{folder}/rows.jsonl") as file:
            assert file.read() == content
        assert asks("HEAD", "GET")
        with opened(f"{folder}/none.jsonl") as file:
            assert file.read() == b""
        assert asks("HEAD")
        assert [*iterate_rows(f"{folder}/rows.parquet")] == [{"a": number} for number in range(9)]
        assert asks("HEAD", "GET", "GET")  # first its end
        assert next(versions_of(f"{folder}/rows.jsonl"))[:2] == (f"{folder}/rows.jsonl", len(content))
        assert asks("HEAD")
        versions([f"{folder}/rows.parquet"])
        assert asks("HEAD", "GET")
        assert DataFile(f"{folder}/rows.jsonl").size() == len(content)
        assert asks("HEAD")


def test_a_checkpoint_takes_two_requests_for_each_file_that_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectStore() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = CheckpointStore(f"s3://{BUCKET}/run")
        store.save(checkpoint(1))
        server.requests.clear()
        assert store.verify(1) == []
    files = len(("manifest", "policy", "critic", "state"))
    assert server.requests == ["HEAD", "GET"] * files
