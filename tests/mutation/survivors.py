"""The table of survivors: what no test notices, with the reason why that is so, which only a person can write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutation.mutants import Mutant

TABLE = Path(__file__).parent / "survivors.tsv"
_HEAD = "package\tmutant\toutcome\treason"


def update(
    table: Path, package: str, mutants: Sequence[Mutant], drawn: Sequence[Mutant], survivors: Mapping[str, str]
) -> int:
    """Puts the survivors of a package into the table, with the reasons that stood there; those of `drawn` that are
    killed now leave it, and those that are no `mutants` of the package any more. Returns how many of the survivors have
    a reason.
    """
    known = {mutant.name for mutant in mutants}
    rows = {(line[0], line[1]): (line[2], line[3]) for line in _read(table) if line[0] != package or line[1] in known}
    for mutant in drawn:
        reason = rows.pop((package, mutant.name), ("", ""))[1]
        if mutant.name in survivors:
            rows[package, mutant.name] = (survivors[mutant.name], reason)
    lines = ["\t".join((*key, *rest)) for key, rest in sorted(rows.items())]
    table.write_text("\n".join([_HEAD, *lines]) + "\n", encoding="utf-8")
    return sum(bool(rows[package, name][1]) for name in survivors)


def excused(table: Path, package: str) -> set[str]:
    """Names of the survivors of a package that have a reason."""
    return {line[1] for line in _read(table) if line[0] == package and line[3]}


def _read(table: Path) -> list[list[str]]:
    if not table.exists():
        return []
    return [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
