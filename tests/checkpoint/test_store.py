from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl.checkpoint.store import Checkpoint, CheckpointStore, load_checkpoint
from skyrl.errors import ResumeError


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step=step,
        tensors={"model.weight": torch.full((2, 2), float(step)), "half": torch.ones(3, dtype=torch.bfloat16)},
        state={"trainer": {"version": step}},
        config={"trainer": {"seed": 1}},
        fingerprint="abc",
    )


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(checkpoint(3))
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    assert (found.step, found.fingerprint, found.config) == (3, "abc", {"trainer": {"seed": 1}})
    assert found.state == {"trainer": {"version": 3}}
    for name, tensor in checkpoint(3).tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_the_latest_is_the_highest_step_and_not_the_last_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (9, 10, 2):
        store.save(checkpoint(step))
    found = store.latest()
    assert found is not None and found.step == 10


def test_a_folder_that_was_never_finished_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))
    (tmp_path / ".unfinished_global_step_2").mkdir()
    assert store.steps() == [1]
    store.save(checkpoint(3))
    assert not (tmp_path / ".unfinished_global_step_2").exists()


def test_only_the_newest_are_kept_when_told_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        store.save(checkpoint(step))
    assert store.steps() == [3, 4]


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nothing").latest() is None


@pytest.mark.parametrize("file", ["state.json", "config.json", "tensors.safetensors"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    folder = CheckpointStore(tmp_path).save(checkpoint(1))
    (folder / file).write_bytes(b"\x00damaged")
    with pytest.raises(ResumeError, match=file):
        load_checkpoint(folder)
    (folder / file).unlink()
    with pytest.raises(ResumeError, match=file):
        load_checkpoint(folder)
