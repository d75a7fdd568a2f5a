"""Buckets at addresses whose paths are absolute."""

from __future__ import annotations

from pathlib import Path

from skyrl.storage.places import storage_at


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
