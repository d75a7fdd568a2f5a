"""Tensors in pieces: what is read of them, how their files are laid out, and what travels to another process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from skyrl.checkpoint.shards import StoredTensors, TensorShard, are_counts, write_shards
from skyrl.checkpoint.store import CheckpointStore
from skyrl.errors import ResumeError
from skyrl.storage.disk import Disk


def test_a_tensor_is_read_from_any_start_to_its_end(tmp_path: Path) -> None:
    shard = TensorShard.from_full_tensor("w", torch.arange(6.0).view(2, 3))
    name = write_shards([shard], Disk(tmp_path), "a", "w.safetensors").name
    tensors = StoredTensors(Disk(tmp_path), "a", (name,))
    assert tensors.read("w", 4).tolist() == [4.0, 5.0]
    assert tensors.read("w", 6).tolist() == []


def test_a_piece_that_reaches_beyond_its_tensor_is_refused_though_the_others_hold_all_of_it(tmp_path: Path) -> None:
    numbers = torch.ones(2)
    shards = [TensorShard(name="w", shape=(2,), start=start, numbers=numbers) for start in (0, 1)]
    names = [write_shards([shard], Disk(tmp_path), "a", f"{shard.start}.safetensors").name for shard in shards]
    with pytest.raises(ResumeError, match=r"1\.safetensors cannot be read: w is not part of a tensor of shape \[2\]"):
        StoredTensors(Disk(tmp_path), "a", tuple(names)).read("w", 0, 1)


@pytest.mark.parametrize("length", range(1, 9))
def test_the_numbers_of_a_file_begin_at_a_multiple_of_eight_bytes(tmp_path: Path, length: int) -> None:
    write_shards([TensorShard.from_full_tensor("w" * length, torch.ones(1))], Disk(tmp_path), "a", "file")
    content = (tmp_path / "a" / "file").read_bytes()
    header = int.from_bytes(content[:8], "little")
    assert header % 8 == 0
    assert json.loads(content[8 : 8 + header])["w" * length]["data_offsets"] == [0, 4]


def test_a_copy_of_a_piece_is_flat_and_unaffected_by_later_changes() -> None:
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    copy = TensorShard(name="w", shape=(4, 2), start=4, numbers=matrix.T).copy_to_host()
    matrix.zero_()
    assert (copy.name, copy.shape, copy.start) == ("w", (4, 2), 4)
    assert copy.numbers.tolist() == [1.0, 3.0, 2.0, 4.0]


def test_tensors_in_an_object_store_travel_as_addresses_and_are_read_at_the_other_end(tmp_path: Path) -> None:
    storage = CheckpointStore(f"memory://{tmp_path}").storage
    name = write_shards([TensorShard.from_full_tensor("w", torch.ones(2))], storage, "a", "w.safetensors").name
    tensors = StoredTensors(storage, "a", (name,))
    assert tensors["w"].tolist() == [1.0, 1.0]  # an index and a connection are there now
    unpickled = pickle.loads(pickle.dumps(tensors))
    assert vars(unpickled).keys() == {"storage", "folder", "files"}
    assert vars(unpickled.storage) == {"address": f"memory://{tmp_path}"}
    assert unpickled["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "are"),
    [([], True), ([0, 3], True), ([-1], False), ([True], False), ([1.0], False), ((1,), False), ("", False)],
    ids=repr,
)
def test_counts_are_a_list_of_whole_numbers_from_0(values: object, are: bool) -> None:
    assert are_counts(values) == are
