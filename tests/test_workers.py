"""Tests that share what takes seconds to start run in one process of `pytest -n`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer

from tests.workers import group_scheduling, groups_of, scope_of

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.workers import group_scheduling as pytest_xdist_make_scheduler
"""


def test_files_with_the_same_mark_are_one_scope_and_a_test_without_one_is_its_own() -> None:
    files = ("learners/test_strategies", "learners/test_resharding", "processes/test_contract")
    assert [scope_of(f"tests/{file}.py::test_it[a::b]", ROOT) for file in files] == ["ranks", "ranks", "ray"]
    assert scope_of("tests/test_workers.py::test_it[1]", ROOT) == "tests/test_workers.py::test_it[1]"


def test_a_test_may_have_a_group_of_its_own() -> None:
    file = "tests/experiments/test_evaluation_alone.py"
    name = "test_greedy_answers_of_engines_on_ray_are_those_of_this_process"
    assert scope_of(f"{file}::{name}[2]", ROOT) == "ray"
    assert scope_of(f"{file}::test_another", ROOT) == f"{file}::test_another"


def test_every_mark_is_one_that_the_scheduler_reads() -> None:
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file != Path(__file__):
            assert len(groups_of(file)) == file.read_text(encoding="utf-8").count("pytest.mark.xdist_group("), file


class Node:
    """A process of `pytest -n` to which tests are given."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.given += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


STRATEGIES = [f"tests/learners/test_strategies.py::test_it[{number}]" for number in range(8)]
ALONE = [f"tests/test_workers.py::test_it[{number}]" for number in range(40)]


@pytest.mark.parametrize("crashes", [False, True])
def test_every_test_is_given_to_one_process_and_to_another_if_that_one_crashes(crashes: bool) -> None:
    option = SimpleNamespace(loadscopereorder=True)
    config: Any = SimpleNamespace(rootpath=ROOT, option=option, getvalue=lambda name: ["2*popen"])
    scheduling = group_scheduling(config, Producer("test", enabled=False))
    nodes = {Node("one"): 0, Node("other"): 0}  # and how many tests they have run
    tests = [*ALONE[:20], *STRATEGIES, *ALONE[20:]]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    first, *_ = nodes
    assert [tests[number] for number in first.given[:8]] == STRATEGIES
    ran = []
    while scheduling.has_pending:
        for node in list(nodes):
            if crashes and node is first and nodes[node] == 5:
                assert scheduling.remove_node(node) == STRATEGIES[5]
                del nodes[node]
            elif nodes[node] < len(node.given):
                number = node.given[nodes[node]]
                nodes[node] += 1
                ran.append(tests[number])
                scheduling.mark_test_complete(node, number)
    assert sorted(ran) == sorted(tests)
    assert scheduling.tests_finished and all(node.shutting_down for node in nodes)


@pytest.mark.long
def test_a_group_runs_in_one_process(tmp_path: Path) -> None:
    body = "import os, pytest\n{}\n@pytest.mark.parametrize('n', range(8))\ndef test_it(n):\n    {}\n"
    note = "open('{}', 'a').write(os.environ['PYTEST_XDIST_WORKER'] + '\\n')"
    mark = 'pytestmark = pytest.mark.xdist_group("g")'
    for name, line in (("one", mark), ("two", mark), ("alone", "")):
        message = note.format("alone" if name == "alone" else "group")
        (tmp_path / f"test_{name}.py").write_text(body.format(line, message), encoding="utf-8")
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=tmp_path, env=environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    noted = {name: (tmp_path / name).read_text(encoding="utf-8").split() for name in ("group", "alone")}
    assert len(noted["group"]) == 16 and len(set(noted["group"])) == 1
    assert len(noted["alone"]) == 8
