"""Which checkpoints stay by each rule, and what is kept in step with them: room, manifests, older uploads."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import attrs
import pytest
import torch

from skyrl.checkpoint.shards import StoredTensors, TensorShard, write_shards
from skyrl.checkpoint.store import CheckpointStore, Retention
from skyrl.storage.disk import Disk
from tests.checkpoint.faulty import checkpoint, equals_checkpoint


@pytest.mark.parametrize(
    ("best", "larger_is_better", "kept"),
    [(0, True, {4}), (1, True, {1, 4}), (1, False, {3, 4}), (2, True, {1, 2, 4}), (2, False, {2, 3, 4})],
)
def test_the_best_are_the_largest_or_the_smallest_and_none_where_none_is_asked_for(
    best: int, larger_is_better: bool, kept: set[int]
) -> None:
    rules = Retention(last=1, best=best, metric="score", larger_is_better=larger_is_better)
    assert rules.steps_to_keep([1, 2, 3, 4], {1: 0.9, 2: 0.5, 3: 0.1}) == kept


def test_rules_that_are_not_set_keep_nothing() -> None:
    values = {1: 0.9, 2: 0.5, 3: 0.1}
    assert Retention(last=1, metric="score").steps_to_keep([1, 2, 3], values) == {3}
    assert Retention(last=1, every=0, best=0, metric="score").steps_to_keep([1, 2, 3], values) == {3}


def test_the_newest_is_kept_by_any_rule() -> None:
    assert Retention(last=0).steps_to_keep([1, 2, 3]) == {3}


def test_the_only_best_one_of_a_folder_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, Retention(last=1, best=1, metric="score"))
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
        store.save(checkpoint(step, score=score))
    assert store.steps() == [2, 3]


def test_a_copied_shard_keeps_its_numbers_when_the_tensor_changes() -> None:
    numbers = torch.zeros(3)
    copied = TensorShard(name="w", shape=(3,), start=0, numbers=numbers).copy_to_host()
    numbers += 1
    assert copied.numbers.tolist() == [0.0, 0.0, 0.0]


def test_a_checkpoint_that_fills_the_disk_to_the_last_byte_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "room", lambda self: 82)
    CheckpointStore(tmp_path).save(checkpoint(3))
    assert equals_checkpoint(CheckpointStore(tmp_path).latest(), 3)


def test_a_model_of_one_rank_and_a_name_in_any_script_are_read_as_they_were_written(tmp_path: Path) -> None:
    saved = attrs.evolve(checkpoint(3), config={"name": "Übung"}, world_size={"policy": 1})
    CheckpointStore(tmp_path).save(saved)
    loaded = CheckpointStore(tmp_path).load(3)
    assert (loaded.config, loaded.world_size) == ({"name": "Übung"}, {"policy": 1})
    assert '"name": "Übung"' in (tmp_path / "global_step_3" / "manifest.json").read_text(encoding="utf-8")


def test_a_step_that_is_saved_again_in_an_object_store_is_no_checkpoint_until_it_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(f"memory://{tmp_path}")
    store.save(checkpoint(3))
    store.begin(3)
    assert store.steps() == []


def test_a_checkpoint_that_cannot_be_moved_aside_is_reported_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, move = CheckpointStore(tmp_path, keep=1), Disk.move
    store.save(checkpoint(1))

    def busy(self: Disk, folder: str, to: str) -> None:
        if to.startswith(".removed"):
            raise OSError(errno.EBUSY, "somebody has it open")
        move(self, folder, to)

    monkeypatch.setattr(Disk, "move", busy)
    with caplog.at_level(logging.WARNING):
        store.save(checkpoint(2))
    assert "global_step_1 cannot be deleted, will retry later" in caplog.text
    assert store.steps() == [1, 2]


def test_a_file_is_made_durable_when_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    Disk(tmp_path).write("file", [b"abc", b"de"])
    assert sizes == [5]


def test_a_rank_that_has_no_numbers_has_a_file_that_is_read(tmp_path: Path) -> None:
    name = write_shards([], Disk(tmp_path), "a", "file").name
    assert list(StoredTensors(Disk(tmp_path), "a", (name,))) == []
