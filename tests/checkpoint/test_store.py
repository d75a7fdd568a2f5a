"""What is saved comes back; what is not whole is never taken for a checkpoint."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file

from skyrl.checkpoint.manifest import read_manifest
from skyrl.checkpoint.shards import StoredTensors, TensorShard, WeightFiles, write_shards
from skyrl.checkpoint.store import CheckpointStore, Retention, finite_metrics, load_checkpoint
from skyrl.errors import ResumeError, RunError
from skyrl.storage.disk import Disk, readable
from tests.checkpoint.faulty import (
    DAMAGES,
    Killed,
    checkpoint,
    equals_checkpoint,
    files_below,
    flip_a_bit,
    store_that_breaks,
)


@pytest.fixture(autouse=True)
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reached the disk, in order. Nobody waits for it: the machine is not switched off here."""
    paths: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: paths.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return paths


@pytest.fixture(params=["disk", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, and an object store."""
    return str(tmp_path) if request.param == "disk" else f"memory://{tmp_path}"


def test_what_was_saved_comes_back_bit_for_bit(address: str) -> None:
    CheckpointStore(address).save(checkpoint(3))
    loaded = CheckpointStore(address).latest()
    assert loaded is not None and loaded.fingerprint == "abc"
    assert equals_checkpoint(loaded, 3)


def test_the_latest_is_the_highest_step_and_not_the_last_name(address: str) -> None:
    store = CheckpointStore(address)
    for step in (9, 10, 2):
        store.save(checkpoint(step))
    assert equals_checkpoint(store.latest(), 10)


def test_only_the_newest_are_kept_when_told_so(address: str) -> None:
    store = CheckpointStore(address, keep=2)
    for step in (1, 2, 3, 4):
        store.save(checkpoint(step))
    assert store.steps() == [3, 4]
    assert sorted(store.storage.names()) == ["global_step_3", "global_step_4"]


def test_no_checkpoint_is_no_error(address: str) -> None:
    assert CheckpointStore(f"{address}/nothing").latest() is None


def test_the_same_step_can_be_saved_again(address: str) -> None:
    store = CheckpointStore(address)
    store.save(checkpoint(3))
    store.save(checkpoint(3))
    assert equals_checkpoint(store.latest(), 3)


def test_a_folder_that_was_never_finished_is_not_a_checkpoint(address: str) -> None:
    store = CheckpointStore(address)
    store.save(checkpoint(1))
    folder = store.begin(2)
    write_shards(
        [TensorShard.from_full_tensor("w", torch.ones(2))], store.storage, folder, "policy/rank_0_of_1.safetensors"
    )
    assert store.steps() == [1]
    store.save(checkpoint(3))
    assert sorted(store.storage.names()) == ["global_step_1", "global_step_3"]


def test_a_file_of_one_rank_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(checkpoint(4))
    tensors = load_file(tmp_path / "global_step_4" / "policy" / "rank_0_of_1.safetensors")
    assert torch.equal(tensors["model.weight"], torch.full((5, 3), 4.0))
    assert torch.equal(tensors["half"], torch.full((3,), 4, dtype=torch.bfloat16))


def test_pieces_of_three_ranks_are_read_as_if_they_were_one_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(14.0).view(7, 2)
    disk, names = Disk(tmp_path), []
    for rank, (start, end) in enumerate([(0, 5), (5, 6), (6, 14)]):
        shard = TensorShard(name="w", shape=(7, 2), start=start, numbers=tensor.view(-1)[start:end])
        names.append(write_shards([shard], disk, "a", f"{rank}.safetensors").name)
    tensors = StoredTensors(disk, "a", tuple(names))
    assert torch.equal(tensors["w"], tensor)
    for start in range(14):
        for count in range(15 - start):
            assert torch.equal(tensors.read("w", start, count), tensor.view(-1)[start : start + count])
    with pytest.raises(ResumeError, match="w lacks 1 of 14 numbers, which are in none of its files"):
        StoredTensors(disk, "a", (names[0], names[2]))["w"]


def test_the_manifest_says_what_wrote_which_run_on_how_many_ranks(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(checkpoint(4, reward=0.5))
    manifest = json.loads((tmp_path / "global_step_4" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["config"] == {"trainer": {"seed": 1, "lr": 1e-06}}
    assert {"python", "skyrl", "torch"} <= manifest["versions"].keys()
    assert manifest["metrics"] == {"reward": 0.5}
    assert [(name, of["size"]) for name, of in manifest["files"].items()] == [
        (str(path.relative_to(tmp_path / "global_step_4")), path.stat().st_size)
        for path in (
            tmp_path / "global_step_4" / "policy" / "rank_0_of_1.safetensors",
            tmp_path / "global_step_4" / "critic" / "rank_0_of_1.safetensors",
            tmp_path / "global_step_4" / "state.json",
        )
    ]


def test_everything_has_reached_the_disk_before_the_folder_gets_its_name(
    tmp_path: Path, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = Disk.move
    before: list[str] = []

    def watched(self: Disk, folder: str, to: str) -> None:
        before.extend(reached)
        move(self, folder, to)

    monkeypatch.setattr(Disk, "move", watched)
    CheckpointStore(tmp_path).save(checkpoint(7))
    folder, scratch = tmp_path / "global_step_7", tmp_path / ".unfinished_global_step_7"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")} | {"."}
    assert {str(Path(path).relative_to(scratch)) for path in before} == names
    assert before[-1] == str(scratch)
    assert reached[-1] == str(tmp_path)


# Interrupted at every operation


def operations_of_a_save(folder: Path) -> list[str]:
    store, breaking = store_that_breaks(folder, 0, "before", Killed())
    for step in (1, 2):
        CheckpointStore(folder).save(checkpoint(step))
    store.save(checkpoint(3))
    assert store.steps() == [2, 3]
    return breaking.done


@pytest.mark.sampled(5)
@pytest.mark.parametrize("moment", ["before", "after", *range(8)])
def test_a_save_that_is_killed_at_any_operation_leaves_the_last_or_this_one_whole(
    tmp_path: Path, moment: str | int
) -> None:
    operations = operations_of_a_save(tmp_path / "count")
    assert len(operations) > 10 and sum(operation.startswith("write") for operation in operations) == 4
    for at, operation in enumerate(operations, start=1):
        if isinstance(moment, int) and not operation.startswith("write"):
            continue
        folder = tmp_path / str(at)
        for step in (1, 2):
            CheckpointStore(folder).save(checkpoint(step))
        store, _ = store_that_breaks(folder, at, moment, Killed())
        with pytest.raises(Killed):
            store.save(checkpoint(3))
        reopened = CheckpointStore(folder, keep=2)
        latest = reopened.latest()
        assert equals_checkpoint(latest, 2) or equals_checkpoint(latest, 3)
        assert all(reopened.verify(step) == [] for step in reopened.steps())
        reopened.save(checkpoint(4))
        assert equals_checkpoint(reopened.latest(), 4)
        assert not [name for name in reopened.storage.names() if name.startswith(".")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("moment", ["before", 4])
def test_a_save_that_the_disk_refuses_at_any_operation_says_so_and_leaves_the_last_one(
    tmp_path: Path, moment: str | int, number: int
) -> None:
    for at in range(1, len(operations_of_a_save(tmp_path / "count")) + 1):
        folder = tmp_path / str(at)
        for step in (1, 2):
            CheckpointStore(folder).save(checkpoint(step))
        store, breaking = store_that_breaks(folder, at, moment, OSError(number, "the disk is tired"))
        message = ""
        try:
            store.save(checkpoint(3))
        except RunError as error:
            message = str(error)
        if message:
            assert "global_step_3 cannot be written: the disk is tired; it needs 82 bytes, and " in message
            assert message.endswith("are free. The checkpoints before it are intact")
            assert not list(folder.glob(".unfinished*")) or breaking.done[at - 1].startswith("remove")
        else:
            assert breaking.done[at - 1].startswith(("remove", "move")), "only old ones may be left for later"
        assert equals_checkpoint(CheckpointStore(folder).latest(), 2 if message else 3)


def test_a_save_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "room", lambda self: 81)
    with pytest.raises(RunError, match=r"there is not enough free space; it needs 82 bytes, and 81 bytes are free"):
        CheckpointStore(tmp_path).save(checkpoint(3))
    assert list(files_below(tmp_path)) == []


# Damage afterwards

FILES = ("manifest.json", "state.json", "policy/rank_0_of_1.safetensors", "critic/rank_0_of_1.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_found(tmp_path: Path, file: str, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(checkpoint(step))
    DAMAGES[damage](tmp_path / "global_step_2" / file)
    with pytest.raises(ResumeError, match=f"global_step_2/{file}"):
        store.latest()
    messages: list[str] = []
    assert equals_checkpoint(store.latest(fall_back=messages.append), 1)
    assert len(messages) == 1 and f"global_step_2/{file}" in messages[0] and "\n" not in messages[0]


def test_every_flipped_bit_is_found_and_its_file_is_named(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A hundred of each file; each one under --long."""
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))
    for file in FILES:
        path = tmp_path / "global_step_1" / file
        original = path.read_bytes()
        every = range(8 * len(original))
        for bit in every if pytestconfig.getoption("--long") else random.Random(0).sample(every, 100):
            content = bytearray(original)
            flip_a_bit(content, bit)
            path.write_bytes(content)
            [problem] = store.verify(1)
            assert str(path) in problem, f"bit {bit} of {file}"
        path.write_bytes(original)
    assert store.verify(1) == []


def test_lengths_alone_are_looked_at_where_that_is_asked_for(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, verify="size")
    store.save(checkpoint(1))
    path = tmp_path / "global_step_1" / "critic" / "rank_0_of_1.safetensors"
    content = bytearray(path.read_bytes())
    flip_a_bit(content, 8 * len(content) - 1)
    path.write_bytes(content)
    assert store.load(1).step == 1
    with pytest.raises(ResumeError, match="critic"):
        load_checkpoint(tmp_path / "global_step_1")


def test_all_damaged_is_an_error_that_names_a_file_of_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(checkpoint(step))
        (tmp_path / f"global_step_{step}" / "state.json").unlink()
    with pytest.raises(ResumeError, match=r"global_step_1/state.json is missing"):
        store.latest(fall_back=lambda line: None)


def test_a_manifest_of_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.checkpoint.manifest.FORMAT", 2)
    CheckpointStore(tmp_path).save(checkpoint(1))
    monkeypatch.setattr("skyrl.checkpoint.manifest.FORMAT", 1)
    with pytest.raises(ResumeError, match="has format 2, but this version reads only up to 1"):
        read_manifest(Disk(tmp_path), "global_step_1")


# Deleting


def test_nothing_is_deleted_for_a_checkpoint_that_is_not_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointStore(tmp_path).save(checkpoint(1))
    monkeypatch.setattr(Disk, "chunks", lambda self, name, size: iter([b"rotten"]))
    with pytest.raises(RunError, match=r"global_step_2/.* is damaged.*no older checkpoint was deleted"):
        CheckpointStore(tmp_path, keep=1).save(checkpoint(2))
    monkeypatch.undo()
    assert CheckpointStore(tmp_path).steps() == [1, 2]


def test_what_cannot_be_deleted_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint(1))

    def busy(self: Disk, name: str) -> None:
        if (self.path / name).exists():
            raise OSError(errno.EBUSY, "somebody has it open")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Disk, "remove", busy)
        store.save(checkpoint(2))
    assert "cannot be deleted, will retry later" in caplog.text
    assert store.steps() == [2]
    store.save(checkpoint(3))
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]


def test_all_are_kept_unless_a_rule_says_otherwise() -> None:
    assert Retention().steps_to_keep([1, 2, 3]) == {1, 2, 3}


def test_the_best_by_a_metric_are_kept_with_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, Retention(last=1, every=4, best=2, metric="score"))
    for step, score in enumerate([0.1, 0.9, 0.3, 0.2, 0.8, 0.1, 0.1], start=1):
        store.save(checkpoint(step, score=score))
    assert store.steps() == [2, 4, 5, 7]


# Messages, numbers, files and weights


def test_a_checkpoint_of_unknown_size_that_cannot_be_written_has_no_size_in_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tired(*arguments: object) -> None:
        raise OSError("the disk is tired")

    monkeypatch.setattr(Disk, "names", tired)
    monkeypatch.setattr(Disk, "write", tired)
    store = CheckpointStore(tmp_path)

    def save_a_file() -> None:
        with store.saving(3):
            tired()

    for write in (partial(store.begin, 3), partial(store.finish, checkpoint(3), []), save_a_file):
        with pytest.raises(RunError) as raised:
            write()
        assert str(raised.value) == (
            f"the checkpoint {tmp_path}/global_step_3 cannot be written: the disk is tired. "
            "The checkpoints before it are intact"
        )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (1_500_000, "1.5 MB"),
        (2 * 10**9, "2.0 GB"),
        (10**12, "1.0 TB"),
        (10**16, "10000.0 TB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_makes_a_short_number(size: int, text: str) -> None:
    assert readable(size) == text


def test_numbers_that_json_does_not_have_are_left_out_of_metrics_and_refused_in_the_state(tmp_path: Path) -> None:
    odd = {"nan": math.nan, "more": math.inf, "less": -math.inf, "loss": -1.5}
    assert finite_metrics(odd) == {"loss": -1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        CheckpointStore(tmp_path).finish(attrs.evolve(checkpoint(1), state=odd), [])
    with pytest.raises(ValueError, match="not JSON compliant"):
        CheckpointStore(tmp_path).save(checkpoint(1, **odd))


def test_any_part_of_a_file_can_be_read(address: str) -> None:
    storage = CheckpointStore(address).storage
    storage.write("folder/file", [b"abc", b"defg"])
    assert storage.size("folder/file") == 7
    assert b"".join(map(bytes, storage.chunks("folder/file"))) == b"abcdefg"
    parts = [(), (0,), (2,), (0, 3), (2, 3), (6, 1), (7, 0), (3, 0)]
    contents = [bytes(storage.read("folder/file", *part)) for part in parts]
    assert contents == [b"abcdefg", b"abcdefg", b"cdefg", b"abc", b"cde", b"g", b"", b""]
    assert (storage.names(), storage.names("folder"), storage.names("nothing")) == (["folder"], ["file"], [])
    storage.remove("folder")
    storage.remove("folder")
    assert storage.names() == []


def test_a_file_that_ends_too_early_is_an_error_that_names_the_byte(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdefg")
    with pytest.raises(OSError, match="file ends before byte 8"):
        Disk(tmp_path).read("file", 5, 3)


def test_making_a_folder_durable_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    Disk(tmp_path).flush("")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_weights_are_handed_over_in_files_of_at_most_a_size_each_of_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.checkpoint.shards.FILE_BYTES", 16)
    weights = {name: torch.full((2,), float(number)) for number, name in enumerate("abcde")}  # 8 bytes each
    hand_over = WeightFiles(storage=Disk(tmp_path), folder="w")
    assert hand_over(iter(weights.items())) == ("0.safetensors", "1.safetensors", "2.safetensors")
    assert [list(load_file(tmp_path / "w" / f"{number}.safetensors")) for number in range(3)] == [
        ["model.a", "model.b"], ["model.c", "model.d"], ["model.e"],
    ]  # fmt: skip
    tensors = StoredTensors(Disk(tmp_path), "w", ("0.safetensors", "1.safetensors", "2.safetensors"))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        f"model.{name}": weight.tolist() for name, weight in weights.items()
    }
    assert hand_over(iter(list(weights.items())[:4])) == ("0.safetensors", "1.safetensors")
    assert hand_over(iter([])) == ()
