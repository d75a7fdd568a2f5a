"""Control groups: where a sandbox has them, no program ever holds more memory than its limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from skyrl.sandbox import memory_groups
from skyrl.sandbox.memory_groups import MemoryGroup, MemoryGroups, sweep
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from tests.sandbox.endless import HOARDS

LIMIT = 400 << 20


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the group that new ones are made in."""

    def parents() -> Iterator[Path]:
        yield tmp_path

    monkeypatch.setattr(memory_groups, "_parents", parents)
    return tmp_path


def peak(group: MemoryGroup) -> int:
    """Bytes that its processes held together at most."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    [file] = [group.folder / name for name in names if (group.folder / name).exists()]
    return int(file.read_text())


@pytest.mark.sampled(3)
def test_a_program_in_a_group_never_holds_more_than_its_limit(sandbox: Sandbox) -> None:
    """Without groups, which an ordinary user may not make, the record of the run says so."""
    group = sandbox.client.groups.take(LIMIT)
    assert (group is not None) == sandbox.record()["memory_group_for_each_program"]
    sandbox.client.groups.give_back(group)
    ran = sandbox.run(HOARDS["in its children together"], limits=ResourceLimits(seconds=120.0, memory_bytes=LIMIT))
    assert (ran.ended, ran.code) == ("exit", 137)
    if group is not None:
        assert LIMIT / 2 < peak(group) <= LIMIT


def test_groups_are_used_again_and_removed_in_the_end(parent: Path) -> None:
    groups = MemoryGroups()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryGroup, "limit", lambda *_: None)
        one, other = groups.take(LIMIT), groups.take(LIMIT)
        assert one is not None and other is not None and one.folder != other.folder
        groups.give_back(one)
        assert groups.take(LIMIT) is one
    groups.give_back(one)
    groups.give_back(other)
    groups.close()
    assert list(parent.iterdir()) == []


def test_a_group_with_files_in_memory_that_a_program_left_is_put_away(parent: Path) -> None:
    groups = MemoryGroups()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryGroup, "limit", lambda *_: None)
        group = groups.take(LIMIT)
        assert group is not None
        for left, is_used_again in ((1 << 20, True), (1 + (1 << 20), False)):
            (group.folder / "memory.stat").write_text(f"cache 99999999\nshmem {left}\nrss 0\n")
            groups.give_back(group)
            assert (groups.take(LIMIT) is group) == is_used_again


def test_what_a_program_leaves_in_memory_is_not_charged_to_the_next(sandbox: Sandbox) -> None:
    limits = ResourceLimits(seconds=100.0, memory_bytes=256 << 20)
    hoard = "for each in range(7):\n  with open(f'/dev/shm/NAME-{each}', 'wb') as file: file.write(bytes(28 << 20))"
    name = f"skyrl-{uuid4().hex}"
    try:
        sandbox.run(hoard.replace("NAME", name), limits=limits)
        ran = sandbox.run("print(len(bytearray(b'x') * (100 << 20)))", limits=limits)
    finally:
        left = list(Path("/dev/shm").glob(f"{name}*"))
        for file in left:
            file.unlink()
    assert (ran.ended, ran.code, ran.stdout) == ("exit", 0, b"104857600\n")
    assert not (left and sandbox.record()["own_user_for_each_program"])


def test_a_kernel_without_limits_of_memory_gives_no_group(parent: Path) -> None:
    assert MemoryGroups().take(LIMIT) is None
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "swap", "none"),
    [("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", str(LIMIT)), ("memory.max", "memory.swap.max", "0")],
)
def test_both_versions_of_control_groups_get_their_limits(tmp_path: Path, name: str, swap: str, none: str) -> None:
    for file in (name, swap):
        (tmp_path / file).touch()
    MemoryGroup(tmp_path, -1).limit(LIMIT)
    assert ((tmp_path / name).read_text(), (tmp_path / swap).read_text()) == (str(LIMIT), none)


def test_groups_of_owners_that_are_gone_are_removed_and_others_stay(parent: Path) -> None:
    left, foreign = parent / "skyrl-sandbox-1-0", parent / "somebody"
    left.mkdir()
    foreign.mkdir()
    group = memory_groups._create_group()
    assert group is not None
    sweep()
    assert sorted(parent.iterdir()) == sorted([foreign, group.folder])
    os.close(group.descriptor)
    sweep()
    assert list(parent.iterdir()) == [foreign]
