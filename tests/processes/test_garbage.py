"""Garbage is collected between steps, and objects that last are left out of the search."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from types import SimpleNamespace

import pytest

from skyrl.processes import garbage
from skyrl.processes.garbage import SELDOM, Collections, lasting_objects, seldom_collected


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.self = self


def is_searched(node: Node) -> bool:
    return any(candidate is node for candidate in gc.get_objects())


def test_what_was_there_before_is_not_searched_until_the_block_ends() -> None:
    before = Node()
    with lasting_objects():
        later = Node()
        assert not is_searched(before)
        assert is_searched(later)
    assert is_searched(before)


@pytest.mark.long
def test_garbage_is_collected_in_the_block_and_that_from_before_after_it() -> None:
    before = weakref.ref(Node())
    with lasting_objects():
        inside = weakref.ref(Node())
        gc.collect()
        assert inside() is None
    gc.collect()
    assert before() is None


@pytest.fixture
def collecting() -> Iterator[None]:
    """Collection is on, as in a program, and happens only where it is asked for."""
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(0)
    yield
    gc.set_threshold(*thresholds)
    if not was_enabled:
        gc.disable()


def test_thresholds_are_those_from_before_after_an_error_too() -> None:
    before = gc.get_threshold()
    with suppress(KeyError), seldom_collected():
        assert gc.get_threshold() == SELDOM
        raise KeyError
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("collecting")
def test_what_a_step_made_is_collected_after_it() -> None:
    collections = Collections()
    collections.between_steps()  # the first one is full, and the next full one is not due
    reference = weakref.ref(Node())
    assert reference() is not None
    collections.between_steps()
    assert reference() is None


@pytest.mark.long
@pytest.mark.usefixtures("collecting")
def test_old_garbage_is_collected_once_full_collections_take_little_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = count()
    own = SimpleNamespace(monotonic=lambda: float(next(clock)))  # each look takes a second
    monkeypatch.setattr(garbage, "time", own)  # of this module alone: finalizers and other threads look at theirs
    collections, node = Collections(), Node()
    collections.between_steps()  # full, for a second: the next one is due after 100
    gc.collect(1)  # the node becomes old
    old = weakref.ref(node)
    del node
    for _ in range(95):
        collections.between_steps()
    assert old() is not None
    for _ in range(10):
        collections.between_steps()
    assert old() is None


def test_a_program_that_has_turned_collection_off_keeps_its_garbage() -> None:
    reference = weakref.ref(Node())
    gc.disable()
    try:
        Collections().between_steps()
        assert reference() is not None
    finally:
        gc.enable()
