"""Removing a folder that other processes still change, after each step of the removal: nothing outside is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl.sandbox import folders

VICTIM = {"victim/precious": "x", "victim/sub/deep": "y", "another/precious": "z"}


class _World:
    """The folder of a program, the places beside it, and descriptors that attackers opened while they could."""

    def __init__(self, root: Path) -> None:
        self.folder, self.outside = root / "folder", root / "outside"
        for name in ("victim", "gate/another", "gate/b/c", "gate/victim", "gate/b/victim"):
            (self.folder / name).mkdir(parents=True)
        for name in ("gate/file", "gate/b/file"):
            (self.folder / name).touch()
        for name, text in VICTIM.items():
            file = self.outside / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.parent.chmod(0o755)
        (self.folder / "gate" / "link").symlink_to(self.outside / "victim")
        folders = {"top": self.folder, "gate": self.folder / "gate", "b": self.folder / "gate" / "b"}
        self.held = {name: os.open(path, os.O_RDONLY) for name, path in folders.items()}
        self.out = os.open(self.outside, os.O_RDONLY)
        guest = self.outside / "guest"
        (guest / "sub").mkdir(parents=True)
        (guest / "sub" / "precious").write_text("w")
        guest.chmod(0o777)
        self.guest = os.open(guest, os.O_RDONLY)
        self.strangers = {os.stat(path).st_ino for path in (guest, guest / "sub")}
        """Numbers of the folders that another user owns, and that anybody may move."""

    def victim(self) -> dict[str, tuple[str, int, int]]:
        """What must not change: texts, and the rights of files and folders."""
        guest = Path(f"/proc/self/fd/{self.guest}")  # wherever it was moved
        files = {name: self.outside / name for name in VICTIM} | {"guest": guest / "sub" / "precious"}
        state = {
            name: (file.read_text(), file.stat().st_mode, file.parent.stat().st_mode) for name, file in files.items()
        }
        return state | {"rights of the guest": ("", guest.stat().st_mode, 0)}

    def fstat(self, number: int) -> object:
        """`os.fstat` where the folders of strangers have another owner, whoever runs the test."""
        status = os.fstat(number)
        return SimpleNamespace(st_uid=status.st_uid + 1) if status.st_ino in self.strangers else status

    def close(self) -> None:
        for number in (*self.held.values(), self.out, self.guest):
            os.close(number)


def _move_out(world: _World, name: str, inside: str) -> None:
    os.rename(name, name, src_dir_fd=world.held[inside], dst_dir_fd=world.out)


def _swap_for_link(world: _World, name: str, inside: str) -> None:
    os.rename(name, f"old-{name}", src_dir_fd=world.held[inside], dst_dir_fd=world.out)
    os.symlink(world.outside / "victim", name, dir_fd=world.held[inside])


def _move_in(world: _World, name: str, inside: str) -> None:
    os.rename("guest", name, src_dir_fd=world.out, dst_dir_fd=world.held[inside])


ATTACKS: dict[str, Callable[[_World], object]] = {
    "a folder is moved beside another": lambda world: _move_out(world, "b", "gate"),
    "a deeper folder is moved beside another": lambda world: _move_out(world, "c", "b"),
    "an empty folder becomes a link": lambda world: _swap_for_link(world, "victim", "top"),
    "an empty folder below becomes a link": lambda world: _swap_for_link(world, "victim", "b"),
    "a full folder becomes a link": lambda world: _swap_for_link(world, "b", "gate"),
    "a file becomes a link": lambda world: _swap_for_link(world, "file", "b"),
    "a stranger's folder is moved in below": lambda world: _move_in(world, "guest", "b"),
    "a stranger's folder replaces an empty one": lambda world: _move_in(world, "victim", "b"),
    "a folder moves up": lambda world: os.rename("c", "c", src_dir_fd=world.held["b"], dst_dir_fd=world.held["top"]),
}


class _Counted:
    """The module `os`, with an attack after the given number of its calls."""

    def __init__(self, attack: Callable[[], object], after: int, fstat: Callable[..., object]) -> None:
        self._attack, self._after, self._fstat, self.calls = attack, after, fstat, 0

    def __getattr__(self, name: str) -> object:
        original = self._fstat if name == "fstat" else getattr(os, name)
        if not callable(original):
            return original

        def call(*args: object, **named: object) -> object:
            result = original(*args, **named)
            self.calls += 1
            if self.calls == self._after:
                with suppress(OSError):
                    self._attack()
            return result

        return call


@pytest.mark.sampled(3)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_moved_during_the_removal_never_leads_it_out(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """With `--long` after every call of `os`, by default after every fifth."""
    step, calls, stride = 0, 1, 1 if pytestconfig.getoption("--long") else 5
    while step <= calls:
        world = _World(tmp_path / str(step))
        before = world.victim()
        counted = _Counted(partial(ATTACKS[attack], world), step, world.fstat)
        monkeypatch.setattr(folders, "os", counted)
        folders.remove_tree(str(world.folder))
        monkeypatch.undo()
        assert world.victim() == before, f"after call {step} of {counted.calls}"
        world.close()
        step, calls = step + stride, counted.calls
    assert calls > 20, "every step was attacked"
    assert not world.folder.exists() or "stranger" in attack, "the last attack came after the last step"


def test_a_folder_of_another_user_is_left_where_it_is_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = _World(tmp_path)
    before = world.victim()
    _move_in(world, "guest", "b")
    monkeypatch.setattr(folders, "os", _Counted(lambda: None, -1, world.fstat))
    folders.remove_tree(str(world.folder))
    monkeypatch.undo()
    assert world.victim() == before
    assert [file.name for file in world.folder.rglob("*") if file.is_file()] == ["precious"]
    assert f"the folder {world.folder} of a sandboxed program was not removed" in caplog.text
    world.close()
