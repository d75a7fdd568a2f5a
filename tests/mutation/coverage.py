"""Which test of a package runs which line: gathered once for one state of the package and its tests."""

from __future__ import annotations

import json
import sys

from attrs import frozen

from tests.mutation.forks import gather, in_a_fork, run_tests
from tests.mutation.journal import FOUND, ROOT, fingerprint
from tests.mutation.mutants import Mutant

PATIENCE = 20.0
"""CPU seconds of tests that are run for one mutant: the fastest that run its line, and at least one."""

Line = tuple[str, int]


@frozen(kw_only=True)
class Coverage:
    """What the tests of a package run."""

    tests: dict[str, tuple[float, set[Line]]]
    """Test -> its CPU seconds, and the lines that it runs."""

    imported: set[Line]
    """Lines that run when their module is imported."""

    libraries: list[str]
    """Modules of other projects that the tests import."""

    def of(self, mutant: Mutant) -> dict[str, float]:
        """Tests that run the mutant's lines, with their CPU seconds, fastest first. For lines that run at import, these
        are the tests that run anything in its module; all tests, where it holds nothing that runs later.
        """
        lines = {(mutant.file, line) for line in range(mutant.line, mutant.last_line + 1)}
        at_import = bool(lines & self.imported)
        if at_import:
            lines |= {line for _, ran in self.tests.values() for line in ran if line[0] == mutant.file}
        fastest = sorted((seconds, name) for name, (seconds, ran) in self.tests.items() if ran & lines)
        if at_import and not fastest:
            fastest = sorted((seconds, name) for name, (seconds, _) in self.tests.items())
        chosen: dict[str, float] = {}
        for seconds, name in fastest:
            if chosen and sum(chosen.values()) + seconds > PATIENCE:
                break
            chosen[name] = seconds
        return chosen


def coverage_of(package: str, tests: list[str]) -> Coverage:
    """Reads what was gathered before, or runs the tests. Exits where they fail without a mutant."""
    state = fingerprint([f"skyrl/{package}", *tests])[:16]
    cache = FOUND / f"lines-{package}-{state}.json"
    if not cache.exists():
        print(f"{package}: looking which test runs which line", flush=True)
        unfinished, folder = cache.with_suffix(".part"), ROOT / "skyrl" / package
        status = in_a_fork(lambda: gather(ROOT, folder, tests, unfinished), FOUND / f"lines-{package}.log")
        if status != 0:
            sys.exit(f"the tests of {package} do not pass without a mutant: {FOUND / f'lines-{package}.log'}")
        unfinished.rename(cache)
    stored = json.loads(cache.read_text(encoding="utf-8"))
    return Coverage(
        tests={
            name: (seconds, {(file, line) for file, line in ran}) for name, (seconds, ran) in stored["tests"].items()
        },
        imported={(file, line) for file, line in stored["imported"]},
        libraries=stored["libraries"],
    )


def refuse_tests_that_always_fail(package: str, coverage: Coverage) -> None:
    """Exits unless the fastest tests pass in a fork like those of mutants, with a module that is not changed."""
    quick = dict(sorted((name, seconds) for name, (seconds, _) in coverage.tests.items() if seconds < 1)[:50])
    path, log = ROOT / "skyrl" / package / "__init__.py", FOUND / f"{package}.log"
    unchanged = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    if in_a_fork(lambda: run_tests(quick, path, unchanged, FOUND / f"{package}.test"), log) != 0:
        sys.exit(f"the tests of {package} do not pass in a fork without a mutant: see {log}")
