"""`python -m tests.mutation algorithms tree`: do the tests of a package notice when a line of it is wrong?

Each mutant is run against those tests of its package that run its line, fastest first, until one fails. All mutants of
`algorithms`, 300 of each other package, drawn with a fixed seed. What was found is kept in `.mutants/`, so that a run
that was stopped resumes, and a mutant whose module and tests are as they were is not run again. Survivors stand in
`tests/mutation/survivors.tsv`, with the reason why one may live, which a person writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path

from attrs import frozen

from tests.mutation.forks import FAILED_ITSELF, gather, in_a_fork, preload, run_tests
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.survivors import TABLE, update

ROOT = Path(__file__).parents[2]
FOUND = ROOT / ".mutants"
DRAWN, SEED = 300, 20_261

PACKAGES: dict[str, tuple[str, ...]] = {
    "algorithms": ("property_tests/test_algorithm_laws.py", "property_tests/test_loss_laws.py"),
    "tree": ("property_tests/test_config_laws.py", "property_tests/test_config_mistakes.py"),
    "config": ("property_tests/test_config_laws.py",),
    "training": (),
    "rollout": ("property_tests/test_stream_laws.py",),
    "weight_sync": (),
    "checkpoint": ("property_tests/test_retention_laws.py",),
}
"""Package -> its tests beside those in the folder of its name."""


def main() -> int:
    """Exit code 1 where fewer than `--least` percent of the mutants that are left without a reason are killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument(
        "--least", type=float, default=85.0, help="percent of each package's mutants that must be killed"
    )
    parser.add_argument("--only", default="", help="a part of the path of the modules to mutate")
    given = parser.parse_args()
    FOUND.mkdir(exist_ok=True)
    scores = [run_package(name, given.only) for name in given.packages]
    return int(any(score < given.least for score in scores))


def run_package(package: str, only: str) -> float:
    """The percentage of its mutants that its tests kill."""
    tests = [f"tests/{package}", *PACKAGES[package]]
    coverage = coverage_of(package, tests)
    preload(coverage.libraries)
    refuse_tests_that_always_fail(package, coverage)
    drawn = [mutant for mutant in drawn_from(package) if only in mutant.file]
    journal = FOUND / f"{package}.jsonl"
    state = fingerprint([f"skyrl/{package}", *tests])
    known = {line["name"]: line["outcome"] for line in lines_of(journal) if line["state"] == state}
    for place, mutant in enumerate(drawn, start=1):
        if mutant.name not in known:
            known[mutant.name] = judge(mutant, tests_of(mutant, coverage))
            entry = {"name": mutant.name, "line": mutant.line, "outcome": known[mutant.name], "state": state}
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        print(f"{package} {place}/{len(drawn)} {known[mutant.name]:9} {mutant.name}", flush=True)
    survivors = [mutant for mutant in drawn if known[mutant.name] in {"survived", "not run"}]
    update(TABLE, package, drawn, {mutant.name: known[mutant.name] for mutant in survivors})
    score = 100 * (1 - len(survivors) / max(1, len(drawn)))
    print(f"{package}: {len(drawn)} mutants, {len(survivors)} survive, {score:.1f} % are killed")
    return score


def drawn_from(package: str) -> list[Mutant]:
    """Those of a package that are run, in the order of the source."""
    files = sorted((ROOT / "skyrl" / package).rglob("*.py"))
    everything = [mutant for file in files for mutant in mutants_of(file, str(file.relative_to(ROOT)))]
    if package == "algorithms" or len(everything) <= DRAWN:
        return everything
    chosen = random.Random(SEED).sample(range(len(everything)), DRAWN)
    return [everything[place] for place in sorted(chosen)]


Line = tuple[str, int]


@frozen(kw_only=True)
class Coverage:
    """What the tests of a package run."""

    tests: dict[str, tuple[float, set[Line]]]
    """Test -> its CPU seconds, and the lines that it runs."""

    imported: set[Line]
    """Lines that run when their module is imported."""

    libraries: list[str]
    """What the tests import of others."""


def coverage_of(package: str, tests: list[str]) -> Coverage:
    """Gathered once for one state of the package and its tests."""
    state = fingerprint([f"skyrl/{package}", *tests])[:16]
    cache = FOUND / f"lines-{package}-{state}.json"
    if not cache.exists():
        print(f"{package}: looking which test runs which line", flush=True)
        unfinished, folder = cache.with_suffix(".part"), ROOT / "skyrl" / package
        status = in_a_fork(lambda: gather(ROOT, folder, tests, unfinished), 3600, FOUND / f"lines-{package}.log")
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
    """In a fork like those of mutants, a module without a change has to pass."""
    quick = [name for _, name in sorted((seconds, name) for name, (seconds, _) in coverage.tests.items())[:50]]
    path, log = ROOT / "skyrl" / package / "__init__.py", FOUND / f"{package}.log"
    unchanged = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    if in_a_fork(lambda: run_tests(quick, path, unchanged), 600, log) != 0:
        sys.exit(f"the tests of {package} do not pass in a fork without a mutant: see {log}")


def tests_of(mutant: Mutant, coverage: Coverage) -> list[tuple[float, str]]:
    """Seconds and name of the tests that run its lines, fastest first; of what runs at import, those of its module."""
    lines = {(mutant.file, line) for line in range(mutant.line, mutant.last_line + 1)}
    if lines & coverage.imported:
        lines |= {line for _, ran in coverage.tests.values() for line in ran if line[0] == mutant.file}
    return sorted((seconds, name) for name, (seconds, ran) in coverage.tests.items() if ran & lines)


def judge(mutant: Mutant, tests: list[tuple[float, str]]) -> str:
    """killed, timeout (which counts as killed), survived, or not run: no test of the package runs its line."""
    if not tests:
        return "not run"
    path = ROOT / mutant.file
    code = mutant.code(path)
    allowed = 60 + int(10 * sum(seconds for seconds, _ in tests))
    log = FOUND / f"{Path(mutant.file).parts[1]}.log"
    status = in_a_fork(lambda: run_tests([name for _, name in tests], path, code), allowed, log)
    if status == FAILED_ITSELF:
        raise RuntimeError(f"{mutant.name} was not tried: see {log}")
    if status < 0:
        return "timeout"
    return "survived" if status == 0 else "killed"


def fingerprint(parts: list[str]) -> str:
    """Of every Python file below these paths."""
    digest = hashlib.sha256()
    for part in parts:
        place = ROOT / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def lines_of(journal: Path) -> list[dict[str, str]]:
    """What earlier runs found; a last line that was cut off is left out."""
    text = journal.read_text(encoding="utf-8") if journal.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


if __name__ == "__main__":
    sys.exit(main())
