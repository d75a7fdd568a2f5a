"""What earlier runs found about mutants: a run that was stopped resumes, and only what changed is tried again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
FOUND = ROOT / ".mutants"
LEFT_OUT = frozenset({"tests/weight_sync/test_vllm_roads.py"})
"""Files of tests that are not asked: this one starts vLLM in a process of its own."""


@frozen
class Outcome:
    """What became of one mutant."""

    what: str
    """killed; timeout, which counts as killed; survived; or not run, where no test of the package runs its line."""

    by: str = ""
    """The test that killed it. Empty for a survivor, and where importing the mutant failed."""

    @property
    def lives(self) -> bool:
        return self.what in {"survived", "not run"}


@frozen
class State:
    """What the outcomes of a package depend on."""

    code: str
    """Fingerprint of the package, and of what its tests share with each other."""

    tests: dict[str, str]
    """File of tests -> its fingerprint."""


def state_of(package: str, tests: list[str]) -> State:
    """`package` and `tests` are files, or folders of Python files."""
    files = [file for part in tests for file in _python_files(part)]
    shared = [file for file in files if not Path(file).name.startswith("test_")]
    code = fingerprint([package, "conftest.py", "tests/conftest.py", *shared])
    return State(code, {file: fingerprint([file]) for file in sorted({*files} - {*shared} - LEFT_OUT)})


class Journal:
    """One line of JSON for each mutant that was tried; the last line about a mutant counts.

    A mutant stays killed while its module and the file of the test that killed it are as they were. A survivor is tried
    again with the files of tests that are new or have changed, and with all of them once anything else in its package,
    or that its tests share, has changed.
    """

    def __init__(self, path: Path, state: State) -> None:
        self._path, self._now = path, state
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]  # the last may be cut off
        self._entries = {line["name"]: line for line in lines}
        self._modules: dict[str, str] = {}

    def outcome(self, name: str) -> Outcome:
        """What became of a mutant that was tried."""
        entry = self._entries[name]
        return Outcome(entry["outcome"], entry["by"])

    def killers(self, name: str) -> list[str]:
        """The test that killed a mutant when it was last tried, which will most likely do so again."""
        entry = self._entries.get(name)
        return [entry["by"]] if entry and entry["by"] else []

    def unasked(self, name: str, file: str) -> set[str]:
        """Files of tests that have to be asked about a mutant of the module `file`: none where its outcome stands."""
        everything, entry = {*self._now.tests}, self._entries.get(name)
        if entry is None or entry["code"] != self._code(file, self.outcome(name)):
            return everything
        changed = {test for test in everything if entry["tests"].get(test) != self._now.tests[test]}
        if self.outcome(name).lives:
            return changed
        return everything if changed & entry["tests"].keys() or entry["tests"].keys() - everything else set()

    def add(self, name: str, file: str, outcome: Outcome) -> None:
        """Writes it down at once."""
        killer = outcome.by.partition("::")[0]
        tests = {test: text for test, text in self._now.tests.items() if outcome.lives or test == killer}
        entry = {"name": name, "outcome": outcome.what, "by": outcome.by, "code": self._code(file, outcome)}
        self._entries[name] = entry | {"tests": tests}
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(self._entries[name]) + "\n")

    def _code(self, file: str, outcome: Outcome) -> str:
        if outcome.lives:
            return self._now.code
        self._modules[file] = self._modules.get(file) or fingerprint([file])
        return self._modules[file]


def fingerprint(parts: list[str]) -> str:
    """The beginning of the SHA-256 of every Python file below these paths."""
    digest = hashlib.sha256()
    for file in (file for part in parts for file in _python_files(part)):
        digest.update(file.encode() + b"\0" + (ROOT / file).read_bytes())
    return digest.hexdigest()[:16]


def _python_files(part: str) -> list[str]:
    """From the root of the project."""
    path = ROOT / part
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return [str(file.relative_to(ROOT)) for file in files]
