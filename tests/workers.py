"""Which tests share a process of `pytest -n`: those of files that carry the same mark `xdist_group`.

pytest-xdist has `--dist=loadgroup` for it, which does nothing under pytest 9.2 and does not say so: it writes the group
into the id of a test, which no longer changes (pytest-dev/pytest-xdist#1386). What takes seconds to start would be
started in every process.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_OF_A_MODULE = re.compile(r'^pytestmark = (?:.|\n )*?\bpytest\.mark\.xdist_group\("(\w+)"\)', re.MULTILINE)
_OF_A_TEST = re.compile(r'^@pytest\.mark\.xdist_group\("(\w+)"\)\n(?:[@ )].*\n)*(?:async )?def (\w+)', re.MULTILINE)


def group_scheduling(config: pytest.Config, log: Any) -> Any:
    """A scheduler that gives the tests of a group to one process, the largest group first, and every other test to the
    next process that is free.
    """
    return _GroupScheduling(config, log)


class _GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """What pytest-xdist looks up in lists whenever a test ends is looked up in dicts: with 12,000 tests that are scopes
    of their own, its process takes a third of the time, and processes of tests wait less for it.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._numbers: dict[str, int] = {}

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid, self.config.rootpath)

    def _assign_work_unit(self, node: Any) -> None:
        """All processes have collected the same tests in the same order."""
        self._numbers = self._numbers or {nodeid: number for number, nodeid in enumerate(self.collection or ())}
        scope, unit = self.workqueue.popitem(last=False)
        self.assigned_work[node][scope] = unit
        node.send_runtest_some([self._numbers[nodeid] for nodeid, is_complete in unit.items() if not is_complete])

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        nodeid = self.registered_collections[node][item_index]
        scope, assigned = self._split_scope(nodeid), self.assigned_work[node]
        assigned[scope][nodeid] = True
        if all(assigned[scope].values()):
            del assigned[scope]  # else its tests are counted again whenever another one ends
        self._reschedule(node)


def scope_of(nodeid: str, root: Path) -> str:
    """The group of a test, or its own id. Marks are read from the text: the process that schedules imports no test."""
    file, _, test = nodeid.partition("::")
    groups = groups_of(root / file)
    return groups.get(test.partition("[")[0]) or groups.get("") or nodeid


@cache
def groups_of(file: Path) -> dict[str, str]:
    """Groups by the name of the test; that of the module has no name."""
    text = file.read_text(encoding="utf-8")
    marked = {name: group for group, name in _OF_A_TEST.findall(text)}
    module = _OF_A_MODULE.search(text)
    return marked | ({"": module[1]} if module else {})
