"""Whatever ends a writer, its place has the old content or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl.errors import UserError
from skyrl.storage.atomic import (
    atomic_file,
    atomic_folder,
    is_being_written,
    refuse_other_files,
    write_file,
    write_files,
)
from tests.kill_moments import put_back, state_of, states_of


def fill(folder: Path, text: str) -> None:
    with atomic_folder(folder) as scratch:
        (scratch / "inner").mkdir()
        for name in ("one", "inner/two"):
            (scratch / name).write_text(text)


def file_of(folder: Path, text: str) -> None:
    write_file(folder / "file", text)


def pair_of(folder: Path, text: str) -> None:
    write_files({folder / "one": text, folder / "two": text})


def folder_of(folder: Path, text: str) -> None:
    fill(folder / "out", text)


WRITERS: dict[str, Callable[[Path, str], None]] = {
    "file": file_of,
    "pair": pair_of,
    "folder": folder_of,
}


def visible(state: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """What has its final name."""
    return {name: content for name, content in state.items() if not name.startswith(".") and "/." not in name}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("before", [None, "old"])
def test_a_killed_writer_leaves_the_old_or_the_new_and_the_next_one_cleans_up(
    writer: str, before: str | None, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    if before is not None:
        WRITERS[writer](place, before)
    with states_of(place) as states:
        WRITERS[writer](place, "new")
    old, new = visible(states[0]), visible(states[-1])
    assert len(states) >= 4 and old != new == states[-1], "the states of the writer were not seen"
    for number, state in enumerate(states):
        seen = visible(state)
        assert seen.items() <= old.items() or seen.items() <= new.items(), "a mixture"
        if seen not in (old, new):
            contents = {content for content in state.values() if content}
            assert b"new" in contents, "neither the old content nor the new one is there"
        again = tmp_path / str(number)
        again.mkdir()
        put_back(state, again)
        WRITERS[writer](again, "new")
        assert state_of(again) == new, "something was left over"


def test_a_folder_between_two_names_is_found_again_if_the_next_writer_fails(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out"):
        raise ZeroDivisionError
    assert state_of(tmp_path) == {"out": None, "out/one": b"old", "out/inner": None, "out/inner/two": b"old"}


def test_a_writer_that_fails_leaves_the_old_content_and_what_is_to_be_kept(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    write_file(tmp_path / "file", "old")

    def fail_in_a_folder() -> None:
        with atomic_folder(tmp_path / "out", keep=("logs",)) as scratch:
            (scratch / "logs").mkdir()
            (scratch / "half").touch()
            raise ZeroDivisionError

    def fail_in_a_file() -> None:
        with atomic_file(tmp_path / "file") as scratch:
            scratch.write_text("new")
            raise ZeroDivisionError

    for fail in (fail_in_a_folder, fail_in_a_file):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert (tmp_path / "out" / "one").read_text() == (tmp_path / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == [".out.new", "file", "out"]
    assert os.listdir(tmp_path / ".out.new") == ["logs"]


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    assert not is_being_written(tmp_path / "out")
    with atomic_folder(tmp_path / "out") as scratch:
        (scratch / "first").touch()
        assert is_being_written(tmp_path / "out")
        with pytest.raises(UserError, match=r"another process writes .*out"), atomic_folder(tmp_path / "out"):
            raise AssertionError("it was let in")
    assert os.listdir(tmp_path / "out") == ["first"]
    assert not is_being_written(tmp_path / "out")
    (tmp_path / ".out.new").mkdir()  # of one that was killed
    assert not is_being_written(tmp_path / "out")


def test_the_current_folder_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    fill(here, "old")
    (here / "gone").touch()
    monkeypatch.chdir(here)
    inode = here.stat().st_ino
    with states_of(here) as states:
        fill(Path(), "new")
    assert here.stat().st_ino == inode
    assert state_of(here) == {"one": b"new", "inner": None, "inner/two": b"new"}
    for state in states:
        contents = {content for name, content in visible(state).items() if name != "gone" and content}
        assert len(contents) <= 1, "a mixture"


def test_links_devices_and_pipes_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/file")
    write_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "file").read_text() == "text"
    (tmp_path / "folder").symlink_to("real")
    fill(tmp_path / "folder", "new")
    assert (tmp_path / "folder").is_symlink() and (tmp_path / "real" / "one").read_text() == "new"
    read, write = os.pipe()
    write_file(Path(f"/dev/fd/{write}"), "text")
    assert os.read(read, 9) == b"text"
    os.close(read)
    os.close(write)
    write_files({Path("/dev/null"): "text", tmp_path / "other": "text"})
    assert (tmp_path / "other").read_text() == "text" and not Path("/dev/null").is_file()


@pytest.mark.parametrize("name", ["notes.txt", "data/", ".git/", "results.json.bak", "model.pt"])
def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "results.json").touch()
    refuse_other_files(tmp_path, ("results.json", "*.safetensors"))
    refuse_other_files(tmp_path / "missing", ())
    (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"holds {name.rstrip('/')}: it would be replaced as a whole"):
        refuse_other_files(tmp_path, ("results.json", "*.safetensors"))
