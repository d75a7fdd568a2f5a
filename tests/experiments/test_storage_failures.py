"""A disk that is full or broken ends a run with a sentence, and the last checkpoint is whole."""

from __future__ import annotations

import builtins
import ctypes
import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl.checkpoint.store import CheckpointStore, could_not_write
from skyrl.errors import ResumeError, RunError, StorageError, UserError
from skyrl.runs.run_lock import RunLock
from skyrl.runs.session import storage_error
from skyrl.storage.disk import Disk
from skyrl.training.trainer import PPOTrainer
from tests.experiments.forked import TINY
from tests.experiments.phases import command
from tests.experiments.sameness import assert_same
from tests.forkserver import CONTEXT
from tests.long_cases import long_except
from tests.nano_run import config, overrides, train

pytestmark = pytest.mark.xdist_group("forked")


@pytest.mark.long
def test_a_write_that_fails_leaves_the_last_checkpoint(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, broken = tmp_path / "whole", tmp_path / "broken"
    settings: dict[str, Any] = {
        "trainer__deterministic": True,
        "trainer__max_training_steps": 4,
        "trainer__eval_interval": -1,
        "trainer__eval_before_train": False,
    }
    sync, calls, at = os.fsync, [0], 0

    def fails(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        train(nano, uninterrupted, **settings)
        calls_per_save = calls[0] // 2
        for at in (1, calls_per_save - 1, calls_per_save + 1, 2 * calls_per_save - 1):  # in the saves of steps 2 and 4
            calls[0] = 0
            broken = tmp_path / f"broken{at}"
            with pytest.raises(RunError, match=r"Input/output error"):
                train(nano, broken, **settings)
            latest = CheckpointStore(broken / "checkpoints").latest()
            assert (latest.step if latest else 0) in ((0, 2) if at < calls_per_save else (2, 4))
    train(nano, broken, **settings)
    assert_same(broken, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("file", long_except(["metrics.jsonl", "trajectories.jsonl"], "metrics.jsonl"))
def test_a_record_that_cannot_be_written_says_what_is_full(
    nano: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name == file and mode == "a" and (tmp_path / "checkpoints" / "global_step_2").exists():
            return builtins.open("/dev/full", "a", encoding="utf-8")
        return real(self, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(
            StorageError, match=r"No space left on device; [\d.]+ [kMGT]B are free in .*run, "
        ) as caught:
            train(nano, tmp_path)
    assert "free some space, and the same command continues from the last checkpoint" in str(caught.value)
    assert train(nano, tmp_path).folder.model.exists()


ENDINGS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "ulimit -f",
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "ulimit -n",
    errno.ENOENT: "removed, renamed or unmounted",
    errno.ENOTDIR: "removed, renamed or unmounted",
    errno.ESTALE: "removed, renamed or unmounted",
    errno.EACCES: "make the folder writable again",
    errno.EPERM: "make the folder writable again",
    errno.EROFS: "make the folder writable again",
    errno.EIO: "see whether the disk",
    errno.ENOTCONN: "see whether the disk",
    errno.ETIMEDOUT: "see whether the disk",
    errno.EBUSY: "see whether the disk",
}


@pytest.mark.parametrize("number", ENDINGS, ids=errno.errorcode.get)
def test_any_error_about_a_file_of_the_run_says_what_to_do(number: int, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "metrics.jsonl"))
    message = str(storage_error(error, [tmp_path]))
    assert f"metrics.jsonl: {os.strerror(number)}; " in message
    assert ENDINGS[number] in message
    assert "the same command continues from the last checkpoint" in message


def test_a_missing_file_of_the_user_is_not_blamed_on_the_disk(tmp_path: Path) -> None:
    assert storage_error(FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/rows.json"), [tmp_path]) is None
    assert storage_error(FileNotFoundError(errno.ENOENT, "No such file"), [tmp_path]) is None


def test_inodes_that_have_run_out_are_told_from_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(tmp_path)
    without = os.statvfs_result([*disk[:5], 26, 0, 0, *disk[8:]])  # files, free ones, free ones for users
    monkeypatch.setattr(os, "statvfs", lambda path: without)
    for message in (
        str(storage_error(OSError(errno.ENOSPC, "No space left on device"), [tmp_path])),
        could_not_write(Disk(tmp_path), "step 2", OSError(errno.ENOSPC, "No space left on device"), need=1),
    ):
        assert "the disk has no inodes left: delete files" in message
        assert "free some space" not in message


def test_what_fails_while_cleaning_up_does_not_replace_the_error_of_the_run(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_descriptors(self: CheckpointStore) -> list[int]:
        raise ResumeError("the content of checkpoints cannot be listed: Too many open files")

    async def fails(*arguments: object) -> None:
        monkeypatch.setattr(CheckpointStore, "steps", out_of_descriptors)
        raise RunError("the first error")

    monkeypatch.setattr("skyrl.training.loop.TrainingLoop.run", fails)
    with pytest.raises(RunError, match="the first error"):
        train(nano, tmp_path)
    assert "Cleaning up failed, too: ResumeError: the content of checkpoints" in capsys.readouterr().err


def test_a_run_whose_folder_is_removed_ends_with_a_sentence(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PPOTrainer.step

    async def removing(self: PPOTrainer, *arguments: Any) -> Any:
        result = await step(self, *arguments)
        (tmp_path / "run").rename(tmp_path / "moved")  # at once: writers of the run may be at work in it
        return result

    monkeypatch.setattr(PPOTrainer, "step", removing)
    with pytest.raises(StorageError, match="removed, renamed or unmounted while the run used it: bring it back"):
        train(nano, tmp_path)


def on_a_small_disk(words: list[str], environment: dict[str, str], folder: Path) -> None:
    """The command with its checkpoints on a disk with room for one and a half; and again with room for all."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    kind, grow = small_disk(checkpoints)
    (folder / "disk").write_text(kind, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        command(words, environment, folder)
    latest = CheckpointStore(checkpoints).latest()
    output = (folder / "said").read_text(encoding="utf-8")
    assert (ended.value.code, latest.step if latest else None) == (1, 2), output
    assert "Traceback" not in output, output
    assert "No space left on device" in output or "there is not enough free space; it needs" in output, output
    grow()
    with pytest.raises(SystemExit) as ended:
        command(words, environment, folder)
    assert ended.value.code == 0, (folder / "said").read_text(encoding="utf-8")
    shutil.copytree(checkpoints, folder / "copy")


def small_disk(folder: Path) -> tuple[str, Callable[[], object]]:
    """A tmpfs at the folder that this process alone sees; returns what kind of disk it is, and what makes it larger.

    Where the kernel lets nobody mount one, the disk is full as soon as the first checkpoint is there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, mounts, private, remount = 0x10000000, 0x00020000, 0x40000 | 0x4000, 0x20
    ids = os.getuid(), os.getgid()
    is_private = libc.unshare(mounts) == 0
    if not is_private and libc.unshare(user | mounts) == 0:
        is_private = True
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"0 {ids[0]} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"0 {ids[1]} 1", encoding="utf-8")
    is_private = is_private and libc.mount(b"none", b"/", None, private, None) == 0
    where, size = os.fsencode(folder), f"size={BYTES_OF_A_CHECKPOINT * 3 // 2}".encode()
    if is_private and libc.mount(b"tmpfs", where, b"tmpfs", 0, size) == 0:
        return "of tmpfs", lambda: libc.mount(b"tmpfs", where, b"tmpfs", remount, b"size=64m")
    patch, sync = pytest.MonkeyPatch(), os.fsync

    def full(descriptor: int) -> None:
        if CheckpointStore(folder).steps():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    patch.setattr(os, "fsync", full)
    return "as fsync says (no tmpfs can be mounted)", patch.undo


BYTES_OF_A_CHECKPOINT = 400_000
"""Of the nano model, with its optimizer: no more than this, and no less than three quarters of it."""


@pytest.mark.long
def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_goes_on_when_there_is_room(
    nano: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    uninterrupted, out = tmp_path / "whole", tmp_path / "out"
    settings = {**TINY, "trainer__max_training_steps": 6}
    train(nano, uninterrupted, **settings)
    size = sum(
        file.stat().st_size for file in (uninterrupted / "checkpoints" / "global_step_2").rglob("*") if file.is_file()
    )
    assert 0.75 * BYTES_OF_A_CHECKPOINT < size <= BYTES_OF_A_CHECKPOINT
    out.mkdir()
    values = overrides(nano, out, **settings)
    words = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]
    process = CONTEXT.Process(target=on_a_small_disk, args=(words, {}, out))
    process.start()
    process.join(240)
    assert process.exitcode == 0, (out / "said").read_text(encoding="utf-8")
    record_property("full disk", (out / "disk").read_text(encoding="utf-8"))
    shutil.rmtree(out / "checkpoints")
    (out / "copy").rename(out / "checkpoints")
    assert_same(out, uninterrupted)


def test_a_second_run_in_the_same_folder_is_told_whose_it_is(nano: Path, tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run", "trainer.run_path", config(nano, tmp_path))
    lock.acquire()
    with pytest.raises(UserError) as caught:
        train(nano, tmp_path)
    lock.release()
    owner = rf"\(process {os.getpid()} on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\dT"
    assert re.search(rf"run is in use by another run {owner}", str(caught.value))
    train(nano, tmp_path)  # the note of the owner alone keeps nobody out
