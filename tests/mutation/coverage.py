"""Which test of a package runs which line: gathered once for one state of the package and each file of its tests."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from attrs import frozen

from tests.mutation.collected import Run
from tests.mutation.forks import in_a_fork
from tests.mutation.journal import FOUND, ROOT, State
from tests.mutation.lines import Line, gather
from tests.mutation.mutants import Mutant

PATIENCE = 15.0
"""CPU seconds of tests that are run for one mutant, and at least one test. A fifth of them where a person has written
why the mutant may live.
"""


@frozen(kw_only=True)
class Coverage:
    """What the tests of a package run."""

    tests: dict[str, tuple[float, set[Line]]]
    """Test -> its CPU seconds, and the lines that it runs."""

    imported: set[Line]
    """Lines that run when their module is imported, or when tests are collected."""

    libraries: list[str]
    """Modules of other projects that the tests import."""

    @cached_property
    def ran(self) -> set[Line]:
        """Every line that runs at all."""
        return self.imported.union(*(ran for _, ran in self.tests.values()))

    def at_import(self, mutant: Mutant) -> bool:
        """Whether any of its lines runs before the first test."""
        return not self.imported.isdisjoint(self._lines(mutant))

    def _lines(self, mutant: Mutant) -> set[Line]:
        """Its own lines, or else the first one of its statement."""
        own = {(mutant.file, line) for line in range(mutant.line, mutant.last_line + 1)}
        return {(mutant.file, mutant.statement)} if own.isdisjoint(self.ran) else own

    def of(
        self, mutant: Mutant, files: Collection[str], first: Sequence[str] = (), *, patience: float = PATIENCE
    ) -> dict[str, float]:
        """Tests in these files that run the mutant's lines, with their CPU seconds, of which `patience` are granted:
        those of `first`, then the fastest, then the fastest of each file. For lines that run at import, these are the
        tests that run anything in its module, and after them all others.
        """
        at_import = self.at_import(mutant)
        lines = self._lines(mutant)
        if at_import:
            lines |= {line for _, ran in self.tests.values() for line in ran if line[0] == mutant.file}
        running = {
            name: (lines.isdisjoint(ran), seconds)
            for name, (seconds, ran) in self.tests.items()
            if name.partition("::")[0] in files and (at_import or not lines.isdisjoint(ran))
        }
        fastest = sorted(running, key=lambda name: (running[name], name))
        fastest = list(dict.fromkeys([*(name for name in first if name in running), *fastest]))
        seconds = {name: running[name][1] for name in fastest}
        chosen = _within(fastest, seconds, patience / 3)
        others = _by_turns([name for name in fastest if name not in chosen])
        return chosen | _within(others, seconds, patience - sum(chosen.values()))


def _within(names: Sequence[str], seconds: Mapping[str, float], most: float) -> dict[str, float]:
    """As many of the tests as `most` seconds allow, and at least one."""
    ends = accumulate(seconds[name] for name in names)
    return {
        name: seconds[name]
        for index, (name, end) in enumerate(zip(names, ends, strict=True))
        if not index or end <= most
    }


def _by_turns(names: Sequence[str]) -> list[str]:
    """The first test of each file, then the second of each, and so on."""
    counted: Counter[str] = Counter()
    turns = []
    for name in names:
        counted[name.partition("::")[0]] += 1
        turns.append(counted[name.partition("::")[0]])
    return [name for _, name in sorted(zip(turns, names, strict=True), key=lambda pair: pair[0])]


def coverage_of(package: str, state: State) -> Coverage:
    """Reads what was gathered before, and runs the files of tests that have changed since. Exits where they fail
    without a mutant.
    """
    cache = FOUND / f"lines-{package}.json"
    stored = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    if stored.get("code") != state.code:
        stored = {"code": state.code, "files": {}, "tests": {}, "imported": [], "libraries": []}
    changed = [file for file, text in state.tests.items() if stored["files"].get(file) != text]
    unchanged = state.tests.keys() - set(changed)
    stored["tests"] = {name: ran for name, ran in stored["tests"].items() if name.partition("::")[0] in unchanged}
    stored["files"] = state.tests
    if changed:
        new = _gathered(package, changed)
        stored["tests"] |= new["tests"]
        stored |= {
            key: list(dict.fromkeys(map(_hashable, stored[key] + new[key]))) for key in ("imported", "libraries")
        }
        cache.write_text(json.dumps(stored), encoding="utf-8")
    return Coverage(
        tests={name: (seconds, set(map(_hashable, ran))) for name, (seconds, ran) in stored["tests"].items()},
        imported=set(map(_hashable, stored["imported"])),
        libraries=stored["libraries"],
    )


def _gathered(package: str, files: list[str]) -> dict[str, Any]:
    print(f"{package}: looking which test runs which line, in {len(files)} files", flush=True)
    result, log = FOUND / f"lines-{package}.part", FOUND / f"lines-{package}.log"
    if in_a_fork(lambda: gather(ROOT, ROOT / "skyrl" / package, files, result), log) != 0:
        sys.exit(f"the tests of {package} do not pass without a mutant: {log}")
    content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return content


def _hashable(stored: Any) -> Any:
    """A line as it was before JSON made a list of it."""
    return tuple(stored) if isinstance(stored, list) else stored


def refuse_tests_that_always_fail(package: str, coverage: Coverage, run: Run) -> None:
    """Exits unless the fastest tests pass in a fork like those of mutants, where no module is changed."""
    seconds = {name: needed for name, (needed, _) in coverage.tests.items()}
    quick = {name: seconds[name] for name in sorted(seconds, key=lambda name: (seconds[name], name))[:50]}
    path, log = ROOT / "no_such_module.py", FOUND / f"{package}.log"
    if in_a_fork(lambda: run(quick, path, compile("", path, "exec"), FOUND / f"{package}.test"), log) != 0:
        sys.exit(f"the tests of {package} do not pass in a fork without a mutant: see {log}")
