"""The table of scores: what each package's tests noticed when they were last asked."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

from attrs import asdict, fields, frozen

TABLE = Path(__file__).parent / "scores.tsv"


@frozen(kw_only=True)
class Score:
    """One row of the table."""

    package: str
    mutants: int
    """All that the package has."""

    tried: int
    killed: int
    excused: int
    """Survivors with a reason in `survivors.tsv`."""

    @property
    def percent(self) -> float:
        """Killed mutants of those that were tried and have no excuse."""
        return 100 * self.killed / max(1, self.tried - self.excused)


def write(table: Path, score: Score, root: Path) -> None:
    """Replaces the row of the package, with today's date and the commit."""
    head = "\t".join([*(field.name for field in fields(Score)), "percent", "date", "commit"])
    rows = table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else []
    numbers = [*map(str, asdict(score).values()), f"{score.percent:.1f}"]
    row = "\t".join([*numbers, f"{datetime.now(UTC):%Y-%m-%d}", _commit(root)])
    kept = [line for line in rows if line.partition("\t")[0] != score.package]
    table.write_text("\n".join([head, *sorted([*kept, row])]) + "\n", encoding="utf-8")


def _commit(root: Path) -> str:
    """Abbreviated, with `+` where code or tests differ from it; `unknown` outside of a repository."""

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", "skyrl", "*.py")
    return f"{commit}{'+' if changed else ''}" if commit else "unknown"
