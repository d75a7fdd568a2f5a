"""`python -m tests.mutation algorithms tree`: do the tests of a package notice when a line of it is wrong?

Each mutant is run against those tests of its package that run its line, fastest first, until one fails. All mutants of
`algorithms`, 300 of each other package, drawn with a fixed seed. What was found is kept in `.mutants/`, so that a run
that was stopped resumes (see `journal.py`). Survivors stand in `tests/mutation/survivors.tsv`, with the reason why one
may live, which a person writes; the scores in `tests/mutation/scores.tsv`. `sabotages` is the list of
`tests/mutation/sabotages.tsv`: mistakes written by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType

import pytest

from tests.mutation import sabotages, scores, survivors
from tests.mutation.collected import NOT_HERE, Run, with_collected
from tests.mutation.coverage import PATIENCE, Coverage, coverage_of, refuse_tests_that_always_fail
from tests.mutation.forks import FAILED_ITSELF, NOTICED, in_a_fork, preload, run_tests
from tests.mutation.journal import FOUND, ROOT, Journal, Outcome, State, state_of
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.scores import Score

DRAWN, SEED = 300, 20_261

PACKAGES: dict[str, tuple[str, ...]] = {
    "algorithms": ("property_tests/test_algorithm_laws.py", "property_tests/test_loss_laws.py"),
    "checkpoint": ("property_tests/test_retention_laws.py",),
    "weight_sync": (),
    "training": (),
    "tree": ("property_tests/test_config_laws.py", "property_tests/test_config_mistakes.py"),
    "rollout": ("property_tests/test_stream_laws.py", "tests/training/test_metrics.py"),
    "config": (
        "property_tests/test_config_laws.py",
        "tests/tree/test_schema.py",
        "tests/training/test_alarms.py",
        "tests/cli/test_plan.py",  # memory, layouts and seconds of a step
        "tests/launchers/test_launch_command.py",
        "tests/sweeps/test_sweeps.py",
        "tests/test_pages.py",  # tables of proposed layouts
    ),
}
"""Package -> its tests beside those in the folder of its name."""

NEIGHBOURS = 5
"""Tests that are asked first, because they noticed other changes of the module; and as many of the whole package."""

SABOTAGES = "sabotages"


def main() -> int:
    """Exit code 1 where fewer than `--least` percent of a package's mutants without an excuse are killed, or where a
    sabotage is not noticed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    names = [*PACKAGES, SABOTAGES]
    parser.add_argument("packages", nargs="*", default=names, help=f"of {', '.join(names)}; default: all")
    parser.add_argument(
        "--least", type=float, default=85.0, help="percent of each package's mutants that must be killed"
    )
    parser.add_argument("--drawn", type=int, default=DRAWN, help=f"mutants of each package but algorithms ({DRAWN})")
    args = parser.parse_args()
    FOUND.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads do not come along into forks
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(FOUND / "bytecode")  # compiled once for all forks
    least = {SABOTAGES: 100.0}
    results = [run_sabotages() if name == SABOTAGES else run_package(name, args.drawn) for name in args.packages]
    for score in results:
        scores.write(scores.TABLE, score, ROOT)
        print(
            f"{score.package}: {score.killed} of {score.tried} killed, {score.excused} excused: {score.percent:.1f} %"
        )
    return int(any(score.percent < least.get(score.package, args.least) for score in results))


def run_package(package: str, drawn: int) -> Score:
    """Tries the mutants of a package, and brings the table of its survivors up to date."""
    tests = [f"tests/{package}", *PACKAGES[package]]
    state = state_of(f"skyrl/{package}", tests)
    coverage = coverage_of(package, state)
    preload(coverage.libraries)
    everything = list(mutants_in(package))
    chosen = everything if package == "algorithms" else draw(everything, drawn)
    later = [mutant for mutant in chosen if not coverage.at_import(mutant)]
    log = FOUND / f"{package}-collected.log"
    print(f"{package}: {len(later)} of {len(chosen)} mutants take their place in collected tests: {log}", flush=True)

    def try_later(run: Run) -> object:
        return try_mutants(package, later, state, coverage, run)

    if in_a_fork(lambda: with_collected(ROOT / "skyrl" / package, [*state.tests], try_later), log) != 0:
        sys.exit(f"the tests of {package} could not be collected: {log}")
    outcomes = try_mutants(package, chosen, state, coverage, run_tests)
    living = {name: outcome.what for name, outcome in outcomes.items() if outcome.lives}
    excused = survivors.update(survivors.TABLE, package, everything, chosen, living)
    killed = len(chosen) - len(living)
    return Score(package=package, mutants=len(everything), tried=len(chosen), killed=killed, excused=excused)


def try_mutants(
    package: str, mutants: Sequence[Mutant], state: State, coverage: Coverage, run: Run
) -> dict[str, Outcome]:
    """What became of each mutant, now or before; those that `run` cannot try are left out."""
    refuse_tests_that_always_fail(package, coverage, run)
    journal = Journal(FOUND / f"{package}.jsonl", state)
    outcomes: dict[str, Outcome] = {}
    excused = survivors.excused(survivors.TABLE, package)
    killers: list[tuple[Mutant, str]] = []
    for number, mutant in enumerate(mutants, start=1):
        if files := journal.unasked(mutant.name, mutant.file):
            patience = PATIENCE / 5 if mutant.name in excused else PATIENCE
            first = [*journal.killers(mutant.name), *neighbours(mutant, killers)]
            tests = coverage.of(mutant, files, first=first, patience=patience)
            outcome = judge(mutant.code(ROOT / mutant.file), mutant.file, tests, run)
            if outcome is None:
                continue
            if not tests and files != state.tests.keys():  # none of the new tests runs its lines
                outcome = journal.outcome(mutant.name)
            journal.add(mutant.name, mutant.file, outcome)
        outcomes[mutant.name] = outcome = journal.outcome(mutant.name)
        if outcome.by:
            killers.append((mutant, outcome.by))
        print(f"{package} {number}/{len(mutants)} {outcome.what:9} {mutant.name}", flush=True)
    return outcomes


def neighbours(mutant: Mutant, killers: Iterable[tuple[Mutant, str]]) -> list[str]:
    """Tests that killed mutants of the same module, those of the same function first, and after them the tests that
    killed most mutants of the package.
    """
    killers = list(killers)
    near = [(other.scope != mutant.scope, test) for other, test in killers if other.file == mutant.file]
    nearest = list(dict.fromkeys(test for _, test in sorted(near, key=lambda pair: pair[0])))[:NEIGHBOURS]
    return [*nearest, *(test for test, _ in Counter(test for _, test in killers).most_common(NEIGHBOURS))]


def mutants_in(package: str) -> Iterable[Mutant]:
    """In the order of the source."""
    for file in sorted((ROOT / "skyrl" / package).rglob("*.py")):
        yield from mutants_of(file, str(file.relative_to(ROOT)))


def draw(mutants: Iterable[Mutant], count: int) -> list[Mutant]:
    """The first `count` in an order that the seed and their names decide: other code leaves most of the draw as it was,
    and any part from its beginning is a sample, too.
    """
    return sorted(mutants, key=lambda mutant: hashlib.sha256(f"{SEED} {mutant.name}".encode()).digest())[:count]


def run_sabotages() -> Score:
    """Tries the sabotages, each against the tests that stand beside it."""
    preload(sabotages.LIBRARIES)
    listed = sabotages.read(sabotages.TABLE)
    journal = Journal(FOUND / f"{SABOTAGES}.jsonl", state_of("skyrl", ["tests", "property_tests"]))
    for sabotage in listed:
        if journal.unasked(sabotage.name, sabotage.file):
            tests = dict.fromkeys(sabotage.tests, 60.0)
            outcome = judge(sabotage.code(ROOT / sabotage.file), sabotage.file, tests, run_tests)
            journal.add(sabotage.name, sabotage.file, outcome or Outcome("not run"))
        outcome = journal.outcome(sabotage.name)
        print(f"{SABOTAGES} {outcome.what:9} {sabotage.name}: {outcome.by}", flush=True)
    killed = sum(not journal.outcome(sabotage.name).lives for sabotage in listed)
    return Score(package=SABOTAGES, mutants=len(listed), tried=len(listed), killed=killed, excused=0)


def judge(code: CodeType, file: str, tests: Mapping[str, float], run: Run) -> Outcome | None:
    """Runs the tests, given with their seconds, where the module `file` is `code`. None if `run` cannot do so."""
    if not tests:
        return Outcome("not run")
    log, current = FOUND / f"{Path(file).parts[1]}.log", FOUND / f"{Path(file).parts[1]}.test"
    status = in_a_fork(lambda: run(tests, ROOT / file, code, current), log)
    if status == FAILED_ITSELF:
        raise RuntimeError(f"a mutant of {file} was not tried: see {log}")
    if status == NOT_HERE:
        return None
    by = current.read_text(encoding="utf-8")
    if status < 0:
        return Outcome("timeout", by)
    if status in NOTICED:
        return Outcome("killed", by)
    return Outcome("survived" if status == pytest.ExitCode.OK else "not run")


if __name__ == "__main__":
    sys.exit(main())
