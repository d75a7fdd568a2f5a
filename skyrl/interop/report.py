"""The conversion report: the outcome of every line of a foreign file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from skyrl.config.entry import RunConfig
from skyrl.errors import Problem

Outcome = Literal["kept", "renamed", "derived", "needless", "not yet", "refused"]
"""kept: under its own name; renamed: under ours; derived: follows from the rest, so left out; needless: asks for what
happens anyway; not yet: a capability that is missing; refused: has no place here, or no valid value."""

_HEADS: dict[Outcome, str] = {
    "kept": "kept",
    "renamed": "renamed",
    "derived": "left out, because it is derived",
    "needless": "left out, because it happens anyway",
    "not yet": "not yet",
    "refused": "refused",
}


@frozen(kw_only=True)
class Line:
    """One setting of the foreign file."""

    outcome: Outcome
    source: str
    """The setting's key in the foreign file."""

    value: Any = None
    targets: tuple[str, ...] = ()
    """Our paths that its value went to."""

    why: str = ""


@frozen(kw_only=True)
class Conversion:
    """Our tables, and the fate of each foreign setting, in the order of the file."""

    root: type[RunConfig]
    """The tree of the kind of run that the file describes."""

    tables: Mapping[str, Any]
    """Nested plain data: what goes into the TOML file."""

    lines: tuple[Line, ...]
    problems: tuple[Problem, ...]
    """Problems that `check` finds in the result; the user decides about them."""

    def counts(self) -> dict[str, int]:
        """How many settings had each fate."""
        counted = Counter(line.outcome for line in self.lines)
        return {outcome: counted[outcome] for outcome in _HEADS if counted[outcome]}

    def report(self) -> str:
        """The report as text: everything that was not simply kept, grouped by outcome."""
        parts = [", ".join(f"{number} {outcome}" for outcome, number in self.counts().items())]
        for outcome, head in _HEADS.items():
            rows = [line for line in self.lines if line.outcome == outcome]
            if rows and outcome != "kept":
                parts += ["", f"{head}:", *(f"  {_row(line)}" for line in rows)]
        return "\n".join(parts)


def _row(line: Line) -> str:
    value = "" if line.outcome in ("renamed", "kept") else f" = {line.value!r}"
    there = f"  ->  {', '.join(line.targets)}" if line.targets and line.outcome == "renamed" else ""
    return f"{line.source}{value}{there}" + (f"  ({line.why})" if line.why else "")
