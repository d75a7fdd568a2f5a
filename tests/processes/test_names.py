"""Names of services: who has them, for how long, and what a store must never give."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from skyrl.errors import ProcessError
from skyrl.processes.naming.names import Entry, NameStore, Published, wait_for
from skyrl.processes.naming.names_on_disk import NamesOnDisk


@pytest.fixture
def store(tmp_path: Path) -> NameStore:
    return NamesOnDisk(tmp_path / "names")


def let_expire(folder: Path) -> None:
    """Every lease in the folder was last renewed long ago."""
    for file in folder.glob("*.name"):
        os.utime(file, (1.0, 1.0))


def test_a_name_is_found_as_long_as_its_owner_has_it(store: NameStore) -> None:
    assert store.get("judge") is None
    with Published(store, "judge", "http://a:1"):
        assert store.get("judge") == "http://a:1"
    assert store.get("judge") is None


def test_names_are_listed_by_their_beginning(store: NameStore) -> None:
    with Published(store, "engines/0", "a"), Published(store, "engines/1", "b"), Published(store, "judge", "c"):
        assert store.find("engines/") == {"engines/0": "a", "engines/1": "b"}


def test_published_name_refuses_second_owner(store: NameStore) -> None:
    with Published(store, "judge", "http://a:1"):
        with pytest.raises(ProcessError, match="taken by http://a:1"), Published(store, "judge", "http://b:1"):
            raise AssertionError("two owners")
        store.remove("judge", "another owner")
        assert store.get("judge") == "http://a:1"


def test_a_name_that_is_not_renewed_is_gone_and_free(tmp_path: Path) -> None:
    store = NamesOnDisk(tmp_path)
    assert store.add("judge", Entry("http://dead:1", "one"), 10)
    let_expire(tmp_path)
    assert store.get("judge") is None
    assert store.find("") == {}
    assert not store.renew("judge", Entry("http://dead:1", "one"), 10)
    assert store.add("judge", Entry("http://new:1", "two"), 10)
    assert store.get("judge") == "http://new:1"


def test_one_of_many_gets_a_name_whose_owner_is_dead(tmp_path: Path) -> None:
    store = NamesOnDisk(tmp_path)
    store.add("judge", Entry("old", "old"), 10)
    let_expire(tmp_path)
    start, got = threading.Barrier(8), []

    def ask(number: int) -> None:
        start.wait()
        if store.add("judge", Entry(str(number), str(number)), 10):
            got.append(str(number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.get("judge")] == got


def test_a_name_is_waited_for(store: NameStore) -> None:
    with Published(store, "judge", "here"):
        assert wait_for(store, "judge", 0) == "here"
    with pytest.raises(ProcessError, match="No server is published under the name judge"):
        wait_for(store, "judge", 0)


def test_a_name_may_hold_any_character(store: NameStore, tmp_path: Path) -> None:
    with Published(store, "../../a b/ü", "x"):
        assert store.find("") == {"../../a b/ü": "x"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["names"]


def test_half_a_file_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "judge.name").write_text('{"value": "x"')
    assert NamesOnDisk(tmp_path).get("judge") is None
