"""Mistakes written by hand: lines that were once wrong without a test that noticed, each with the tests that must.

A row of `sabotages.tsv` has the name of the mistake, the module, the text that stands there exactly once, what takes
its place, and the test files, separated by spaces. A line break is written as in Python.
"""

from __future__ import annotations

from pathlib import Path
from types import CodeType

from attrs import frozen

TABLE = Path(__file__).parent / "sabotages.tsv"
LIBRARIES = ("torch", "transformers", "numpy", "pytest_asyncio.plugin", "hypothesis", "httpx")
"""What most of the tests import."""


@frozen
class Sabotage:
    """One row of the table."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def code(self, path: Path) -> CodeType:
        """The module at `path` with the mistake, compiled. Raises ValueError where the text is not there once."""
        source = path.read_text(encoding="utf-8")
        if source.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.file} has {source.count(self.before)} times {self.before!r}")
        return compile(source.replace(self.before, self.after), str(path), "exec", dont_inherit=True)


def read(table: Path) -> list[Sabotage]:
    """The rows of the table, without its head."""
    sabotages = []
    for line in table.read_text(encoding="utf-8").splitlines()[1:]:
        name, file, before, after, tests = line.split("\t")
        changed = before.replace("\\n", "\n"), after.replace("\\n", "\n")
        sabotages.append(Sabotage(name, file, *changed, tuple(tests.split())))
    return sabotages
