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
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType

from tests.mutation import sabotages, scores, survivors
from tests.mutation.coverage import coverage_of, refuse_tests_that_always_fail
from tests.mutation.forks import FAILED_ITSELF, in_a_fork, preload, run_tests
from tests.mutation.journal import FOUND, ROOT, Journal, Outcome
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
    "config": ("property_tests/test_config_laws.py",),
}
"""Package -> its tests beside those in the folder of its name."""

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
    given = parser.parse_args()
    FOUND.mkdir(exist_ok=True)
    least = {SABOTAGES: 100.0}
    found = [run_sabotages() if name == SABOTAGES else run_package(name, given.drawn) for name in given.packages]
    for score in found:
        scores.write(scores.TABLE, score, ROOT)
        print(
            f"{score.package}: {score.killed} of {score.tried} killed, {score.excused} excused: {score.percent:.1f} %"
        )
    return int(any(score.percent < least.get(score.package, given.least) for score in found))


def run_package(package: str, drawn: int) -> Score:
    """Tries the mutants of a package, and brings the table of its survivors up to date."""
    tests = [f"tests/{package}", *PACKAGES[package]]
    coverage = coverage_of(package, tests)
    preload(coverage.libraries)
    refuse_tests_that_always_fail(package, coverage)
    everything = list(mutants_in(package))
    chosen = everything if package == "algorithms" else draw(everything, drawn)
    journal = Journal(FOUND / f"{package}.jsonl", [f"skyrl/{package}", *tests])
    found: dict[str, Outcome] = {}
    for place, mutant in enumerate(chosen, start=1):
        known = journal.outcome(mutant.name, mutant.file)
        found[mutant.name] = known or judge(mutant.code(ROOT / mutant.file), mutant.file, coverage.of(mutant))
        if known is None:
            journal.add(mutant.name, mutant.file, found[mutant.name])
        print(f"{package} {place}/{len(chosen)} {found[mutant.name].what:9} {mutant.name}", flush=True)
    living = {name: outcome.what for name, outcome in found.items() if outcome.lives}
    excused = survivors.update(survivors.TABLE, package, chosen, living)
    killed = len(chosen) - len(living)
    return Score(package=package, mutants=len(everything), tried=len(chosen), killed=killed, excused=excused)


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
    journal = Journal(FOUND / f"{SABOTAGES}.jsonl", ["skyrl", "tests", "property_tests"])
    found: dict[str, Outcome] = {}
    for sabotage in listed:
        known = journal.outcome(sabotage.name, sabotage.file)
        tests = dict.fromkeys(sabotage.tests, 60.0)
        found[sabotage.name] = known or judge(sabotage.code(ROOT / sabotage.file), sabotage.file, tests)
        if known is None:
            journal.add(sabotage.name, sabotage.file, found[sabotage.name])
        print(f"{SABOTAGES} {found[sabotage.name].what:9} {sabotage.name}: {found[sabotage.name].by}", flush=True)
    killed = sum(not outcome.lives for outcome in found.values())
    return Score(package=SABOTAGES, mutants=len(listed), tried=len(listed), killed=killed, excused=0)


def judge(code: CodeType, file: str, tests: Mapping[str, float]) -> Outcome:
    """Runs the tests, given with their seconds, where the module `file` is `code`."""
    if not tests:
        return Outcome("not run")
    log, current = FOUND / f"{Path(file).parts[1]}.log", FOUND / f"{Path(file).parts[1]}.test"
    status = in_a_fork(lambda: run_tests(tests, ROOT / file, code, current), log)
    if status == FAILED_ITSELF:
        raise RuntimeError(f"a mutant of {file} was not tried: see {log}")
    by = current.read_text(encoding="utf-8")
    if status < 0:
        return Outcome("timeout", by)
    return Outcome("survived") if status == 0 else Outcome("killed", by)


if __name__ == "__main__":
    sys.exit(main())
