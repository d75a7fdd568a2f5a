"""The tool that changes lines: which changes it makes, and that tests which notice are told from those that do not."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.mutation.__main__ import judge
from tests.mutation.coverage import Coverage
from tests.mutation.forks import in_a_fork, run_tests
from tests.mutation.journal import ROOT, Journal, Outcome, state_of
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.sabotages import TABLE as SABOTAGES
from tests.mutation.sabotages import read
from tests.mutation.scores import Score, write
from tests.mutation.survivors import update

MODULE = '''
"""Never changed: 1 + 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LIMIT: int = 3


class Counter:
    def add(self, number: int, *, twice: bool = False) -> int:
        """Nor is this: 1 < 2."""
        assert number > 0
        if number < LIMIT and twice:
            print("small")
            number *= 2
        return number - 1 if not twice else -number
'''

CHANGES = [
    (": 3 -> 4"),
    ("Counter.add: False -> True"),
    ("Counter.add: number < LIMIT and twice -> not (number < LIMIT and twice)"),
    ("Counter.add: number < LIMIT and twice -> number < LIMIT or twice"),
    ("Counter.add: number < LIMIT -> number <= LIMIT"),
    ("Counter.add: print('small') -> None"),
    ("Counter.add: number *= 2 -> number /= 2"),
    ("Counter.add: 2 -> 3"),
    ("Counter.add: not twice -> bool(twice)"),
    ("Counter.add: number - 1 -> number + 1"),
    ("Counter.add: 1 -> 2"),
    ("Counter.add: -number -> number"),
]


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "module.py"
    file.write_text(MODULE, encoding="utf-8")
    return file


def test_a_line_that_python_never_reports_is_asked_of_the_tests_that_run_its_statement(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("def f(a):\n    return a in (\n        -1,\n        0,\n    )\n", encoding="utf-8")
    minus = next(mutant for mutant in mutants_of(file, "m.py") if mutant.what == "-1 -> 1")
    assert (minus.line, minus.statement) == (3, 2)
    coverage = Coverage(tests={"t.py::test_f": (0.5, {("m.py", 2)})}, imported={("m.py", 1)}, libraries=[])
    assert coverage.of(minus, {"t.py"}) == {"t.py::test_f": 0.5}
    assert not coverage.at_import(minus)


def test_after_the_fastest_tests_each_file_has_its_turn(tmp_path: Path) -> None:
    seconds = {
        "a.py::1": 0.5,
        "a.py::2": 0.6,
        "a.py::3": 0.7,
        "a.py::4": 1.0,
        "a.py::5": 1.1,
        "b.py::1": 1.2,
        "b.py::2": 9,
    }
    ran = {("m.py", 1)}
    coverage = Coverage(
        tests={name: (duration, ran) for name, duration in seconds.items()}, imported=set(), libraries=[]
    )
    (tmp_path / "m.py").write_text("x = 1\n", encoding="utf-8")
    [mutant] = mutants_of(tmp_path / "m.py", "m.py")
    order = ["a.py::2", "a.py::1", "a.py::3", "a.py::4", "b.py::1", "a.py::5"]  # the last of b would be beyond 6 s
    assert list(coverage.of(mutant, {"a.py", "b.py"}, first=["a.py::2"], patience=6.0)) == order


def returned(mutant: Mutant, module: Path, number: int, **more: bool) -> int:
    names: dict[str, type] = {"__name__": "module"}  # type: ignore[dict-item]  # a namespace
    exec(mutant.code(module), names)
    added: int = names["Counter"]().add(number, **more)
    return added


def test_every_operator_condition_number_flag_and_call_is_changed_once(module: Path) -> None:
    changes = [f"{mutant.scope}: {mutant.what}" for mutant in mutants_of(module, "module.py")]
    assert sorted(changes) == sorted(CHANGES)


@pytest.mark.parametrize(
    ("change", "number", "twice", "before", "after"),
    [
        ("3 -> 4", 3, True, -3, -6),
        ("False -> True", 5, None, 4, -5),
        ("number < LIMIT -> number <= LIMIT", 3, True, -3, -6),
        ("number *= 2 -> number /= 2", 2, True, -4, -1),
        ("number - 1 -> number + 1", 5, False, 4, 6),
        ("not twice -> bool(twice)", 5, False, 4, -5),
        ("-number -> number", 5, True, -5, 5),
    ],
)
def test_a_mutant_does_what_it_says(
    module: Path, change: str, number: int, twice: bool | None, before: int, after: int
) -> None:
    mutants = mutants_of(module, "module.py")
    [mutant] = [mutant for mutant in mutants if mutant.what == change]
    untouched = next(mutant for mutant in mutants if mutant.what.startswith("print"))
    kwargs = {} if twice is None else {"twice": twice}
    assert returned(untouched, module, number, **kwargs) == before
    assert returned(mutant, module, number, **kwargs) == after


def test_the_same_change_in_one_function_has_names_apart(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("def f(a):\n    return [a + 1, a + 1]\n", encoding="utf-8")
    changes = [mutant.what for mutant in mutants_of(file, "m.py")]
    assert changes == ["a + 1 -> a - 1", "1 -> 2", "a + 1 -> a - 1 (#2)", "1 -> 2 (#2)"]


def test_a_name_survives_lines_above_it(module: Path) -> None:
    before = [mutant.name for mutant in mutants_of(module, "module.py")]
    module.write_text("\n\n# a comment\n" + MODULE, encoding="utf-8")
    assert [mutant.name for mutant in mutants_of(module, "module.py")] == before


SIGN = """
def sign(number):
    if number > 0:
        return 1
    return -1
"""
TEST = """
from skyrl.weight_sync.sign import sign

def test_of_a_positive_number():
    assert sign(5) == 1
"""
OUTCOMES = {
    "number > 0 -> not number > 0": "killed",
    "number > 0 -> number >= 0": "survived",
    "0 -> 1": "survived",
    "1 -> 2": "killed",
    "-1 -> 1": "not run",
    "1 -> 2 (#2)": "not run",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one function, and one test that looks at one of its branches."""
    shutil.copytree(Path(__file__).parent, tmp_path / "tests" / "mutation")
    for table in ("survivors.tsv", "scores.tsv"):
        (tmp_path / "tests" / "mutation" / table).unlink(missing_ok=True)
    (tmp_path / "tests" / "weight_sync").mkdir()
    (tmp_path / "tests" / "weight_sync" / "test_sign.py").write_text(TEST, encoding="utf-8")
    (tmp_path / "skyrl" / "weight_sync").mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("weight_sync/__init__.py", ""), ("weight_sync/sign.py", SIGN)):
        (tmp_path / "skyrl" / name).write_text(text, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
    return tmp_path


def mutated(project: Path) -> tuple[int, dict[str, str], str]:
    """The exit code of the tool, the outcome of each change, and the table of survivors."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.mutation", "weight_sync"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (project / ".mutants" / "weight_sync.jsonl").read_text(encoding="utf-8").splitlines()
    outcomes = {entry["name"].split(": ", 1)[1]: entry["outcome"] for entry in map(json.loads, lines)}
    return result.returncode, outcomes, (project / "tests" / "mutation" / "survivors.tsv").read_text(encoding="utf-8")


@pytest.mark.long
def test_what_a_test_notices_is_told_from_what_none_does_and_is_not_run_again(project: Path) -> None:
    status, outcomes, table = mutated(project)
    assert (status, outcomes) == (1, OUTCOMES)  # a third of them is killed
    assert table.count("\n") == 1 + 4
    journal_file = project / ".mutants" / "weight_sync.jsonl"
    before = journal_file.read_text(encoding="utf-8")
    assert mutated(project) == (status, outcomes, table)
    assert journal_file.read_text(encoding="utf-8") == before
    test = project / "tests" / "weight_sync" / "test_sign.py"
    test.write_text(TEST + "    assert [sign(n) for n in (1, 0, -1)] == [1, -1, -1]\n", encoding="utf-8")
    status, _, table = mutated(project)
    assert (status, table.count("\n")) == (0, 1)


def test_a_reason_stays_with_its_survivor_and_leaves_with_it(module: Path, tmp_path: Path) -> None:
    table, mutants = tmp_path / "table.tsv", mutants_of(module, "module.py")[:2]
    update(table, "p", mutants, mutants, {mutants[0].name: "survived", mutants[1].name: "not run"})
    text = table.read_text(encoding="utf-8").replace("survived\t", "survived\tno one asks")
    table.write_text(text, encoding="utf-8")
    update(table, "p", mutants, mutants, {mutants[0].name: "survived"})
    assert table.read_text(encoding="utf-8").splitlines()[1:] == [f"p\t{mutants[0].name}\tsurvived\tno one asks"]
    update(table, "p", mutants, mutants[1:], {})  # the other one was not drawn
    assert table.read_text(encoding="utf-8").count("\n") == 2
    update(table, "p", mutants[1:], [], {})  # and is gone now
    assert table.read_text(encoding="utf-8").count("\n") == 1


def test_a_test_that_takes_far_longer_than_it_did_is_ended_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutation.forks.CPU_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    current = tmp_path / "current"
    (tmp_path / "test_waits.py").write_text("def test_waits():\n    while True:\n        pass\n", encoding="utf-8")
    nothing, tests = compile("", "none.py", "exec"), {"test_waits.py::test_waits": 0.0}
    status = in_a_fork(lambda: run_tests(tests, tmp_path / "none.py", nothing, current), tmp_path / "log")
    assert status == -signal.SIGXCPU
    assert current.read_text(encoding="utf-8") == "test_waits.py::test_waits"
    assert in_a_fork(lambda: 3, tmp_path / "log") == 3


def test_what_a_fork_leaves_in_the_temporary_folder_goes_with_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def left_behind() -> int:
        inside = Path(tempfile.mkdtemp())
        child = subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"], stdout=-1, check=True
        )
        kept.write_text(f"{inside}\n{child.stdout.decode()}", encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert in_a_fork(left_behind, tmp_path / "log") == -signal.SIGKILL
    folders = [Path(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    assert [(folder.name[:3], folder.exists()) for folder in folders] == [("tmp", False)] * 2


def test_only_files_that_can_change_an_outcome_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutation.journal.ROOT", tmp_path)
    files = ("package/module.py", "package/other.py", "tests/test_a.py", "tests/test_b.py", "tests/cases.py")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    outcomes = {
        "killed": Outcome("killed", "tests/test_a.py::test_x[1]"),
        "late": Outcome("timeout", "tests/test_b.py::test_y"),
        "broken": Outcome("killed"),
        "alive": Outcome("survived"),
    }

    def journal() -> Journal:
        return Journal(tmp_path / "journal", state_of("package", ["tests"]))

    for name, outcome in outcomes.items():
        journal().add(name, "package/module.py", outcome)
        assert journal().outcome(name) == outcome
        assert journal().killers(name) == ([outcome.by] if outcome.by else [])
    assert journal().killers("of another module") == []

    def unasked() -> dict[str, set[str]]:
        unasked_tests = {name: journal().unasked(name, "package/module.py") for name in outcomes}
        return {name: tests for name, tests in unasked_tests.items() if tests}

    a, both = {"tests/test_a.py"}, {"tests/test_a.py", "tests/test_b.py"}
    assert unasked() == {}
    for changed, expected in (
        ("tests/test_a.py", {"killed": both, "alive": a}),  # its killer may have gone, the survivor has a new test
        ("tests/cases.py", {"killed": both, "alive": both}),
        ("package/module.py", {"killed": both, "late": both, "broken": both, "alive": both}),
    ):
        (tmp_path / changed).write_text("pass", encoding="utf-8")
        assert unasked() == expected


NOTICES = "from module import CASES\n\ndef test_x():\n    assert CASES\n"
THE_TEST = "of_it/test_it.py::test_x"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("selected", "test", "outcome"),
    [
        (THE_TEST, NOTICES, Outcome("killed", THE_TEST)),
        ("of_it/test_it.py", NOTICES, Outcome("killed", THE_TEST)),
        ("of_it", NOTICES, Outcome("killed", THE_TEST)),
        (THE_TEST, "import module\n\ndef test_x():\n    assert module.CASES is not None\n", Outcome("survived")),
        (THE_TEST, "from module import CASES\n\nif CASES:\n    def test_x(): pass\n", Outcome("not run")),
        (THE_TEST, "from module import CASES\n\nassert CASES\n\ndef test_x(): pass\n", Outcome("killed")),
    ],
    ids=[
        "a test fails",
        "one of a file fails",
        "one of a folder fails",
        "no test fails",
        "there is no test",
        "the tests cannot be imported",
    ],
)
def test_a_mutant_is_killed_by_a_test_that_fails_and_not_by_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selected: str, test: str, outcome: Outcome
) -> None:
    for name in ("ROOT", "FOUND"):
        monkeypatch.setattr(f"tests.mutation.__main__.{name}", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "code")
    for name, text in (
        ("pytest.ini", "[pytest]\n"),
        ("code/module.py", "CASES = [1]\n"),
        ("of_it/test_it.py", test),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    mutant = compile("CASES = []", "module.py", "exec", dont_inherit=True)
    faulthandler.cancel_dump_traceback_later()  # its thread does not come along into a fork, which would wait for it
    assert judge(mutant, "code/module.py", {selected: 0.0}, run_tests) == outcome


def test_a_score_leaves_out_what_has_a_reason_and_replaces_the_row_of_its_package(tmp_path: Path) -> None:
    table = tmp_path / "scores.tsv"
    for package, killed in (("b", 1), ("a", 2), ("b", 3)):
        write(table, Score(package=package, mutants=9, tried=6, killed=killed, excused=1), tmp_path)
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()]
    assert rows[0] == ["package", "mutants", "tried", "killed", "excused", "percent", "date", "commit"]
    assert [row[:6] for row in rows[1:]] == [["a", "9", "6", "2", "1", "40.0"], ["b", "9", "6", "3", "1", "60.0"]]
    assert {row[7] for row in rows[1:]} == {"unknown"}  # not in a repository


def test_a_sabotage_changes_the_one_place_that_it_names(tmp_path: Path) -> None:
    table, module = tmp_path / "sabotages.tsv", tmp_path / "m.py"
    table.write_text("head\nx is two\tm.py\tx = 1\\n\tx = 2\\n\ttests/a.py tests/b.py\n", encoding="utf-8")
    [sabotage] = read(table)
    assert (sabotage.before, sabotage.after, sabotage.tests) == ("x = 1\n", "x = 2\n", ("tests/a.py", "tests/b.py"))
    module.write_text("x = 1\ny = x\n", encoding="utf-8")
    names: dict[str, int] = {}
    exec(sabotage.code(module), names)
    assert names["y"] == 2
    module.write_text("x = 1\nx = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="x is two: m.py has 2 times"):
        sabotage.code(module)


def test_every_sabotage_still_names_a_place_of_the_code_and_tests_that_exist() -> None:
    for sabotage in read(SABOTAGES):
        sabotage.code(ROOT / sabotage.file)
        assert [test for test in sabotage.tests if not (ROOT / test).exists()] == [], sabotage.name
