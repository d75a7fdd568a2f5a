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
    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = lambda nodeid: scope_of(nodeid, config.rootpath)
    return scheduling


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
