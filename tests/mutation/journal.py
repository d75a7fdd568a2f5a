"""What earlier runs found about mutants: a run that was stopped resumes, and only what changed is tried again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
FOUND = ROOT / ".mutants"


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


class Journal:
    """One line of JSON for each mutant that was tried; the last line about a mutant counts.

    A mutant stays killed while its module and the file of the test that killed it are as they were. A survivor is tried
    again once anything in its package or in the tests of its package has changed.
    """

    def __init__(self, path: Path, everything: list[str]) -> None:
        self._path, self._everything = path, everything
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]  # the last may be cut off
        self._entries = {line["name"]: line for line in lines}
        self._states: dict[tuple[str, ...], str] = {}

    def outcome(self, name: str, file: str) -> Outcome | None:
        """What became of a mutant of `file`; None if it was not tried, or has to be tried again."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        outcome = Outcome(entry["outcome"], entry["by"])
        return outcome if entry["state"] == self._state(file, outcome) else None

    def add(self, name: str, file: str, outcome: Outcome) -> None:
        """Writes it down at once."""
        state = self._state(file, outcome)
        entry = {"name": name, "outcome": outcome.what, "by": outcome.by, "state": state}
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry) + "\n")

    def _state(self, file: str, outcome: Outcome) -> str:
        test = outcome.by.partition("::")[0]
        parts = self._everything if outcome.lives else [file, *([test] if test else [])]
        key = tuple(parts)
        self._states[key] = self._states.get(key) or fingerprint(parts)
        return self._states[key]


def fingerprint(parts: list[str]) -> str:
    """SHA-256 of every Python file below these paths."""
    digest = hashlib.sha256()
    for part in parts:
        place = ROOT / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0")
            digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()
