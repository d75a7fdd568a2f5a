"""Objects that last are left out of searches for garbage."""

from __future__ import annotations

import gc
import weakref

from skyrl.processes.garbage import lasting_objects


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.self = self


def is_searched(node: Node) -> bool:
    return any(each is node for each in gc.get_objects())


def test_what_was_there_before_is_not_searched_until_the_block_ends() -> None:
    before = Node()
    with lasting_objects():
        later = Node()
        assert not is_searched(before)
        assert is_searched(later)
    assert is_searched(before)


def test_garbage_is_collected_in_the_block_and_that_from_before_after_it() -> None:
    before = weakref.ref(Node())
    with lasting_objects():
        inside = weakref.ref(Node())
        gc.collect()
        assert inside() is None
    gc.collect()
    assert before() is None
