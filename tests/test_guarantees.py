"""Each promise names tests that exist, and results are stored as they were."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests import guarantees

ROOT = Path(__file__).parents[1]
TESTS = sorted({test for guarantee in guarantees.GUARANTEES for test in guarantee.tests})


@pytest.mark.parametrize("test", TESTS)
def test_a_test_that_a_promise_names_exists(test: str) -> None:
    file, _, function = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_stored_results_are_of_tests_that_a_promise_names() -> None:
    assert set(guarantees.stored()) <= set(TESTS)


def test_passed_cases_are_counted_and_a_failed_one_takes_the_result_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    file.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(guarantees, "RESULTS", file)
    guarantees.record([f"{TESTS[0]}[a]", f"{TESTS[0]}[b]", TESTS[1], "tests/other.py::test"], [], "2026-01-02")
    expected = {TESTS[0]: {"cases": 2, "day": "2026-01-02"}, TESTS[1]: {"cases": 1, "day": "2026-01-02"}}
    assert json.loads(file.read_text(encoding="utf-8")) == expected
    guarantees.record([f"{TESTS[0]}[a]"], [f"{TESTS[0]}[b]"], "2026-01-03")
    assert guarantees.stored() == {TESTS[1]: expected[TESTS[1]]}
