"""Fields and values of the tree that this version does not implement. The table may only become shorter.

Every field is either shown to have an effect by a probe of `tests/effects`, or listed here. An entry names the values
that run; any other value is refused or warned about, with the capability that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import Factory, field, frozen

from skyrl.config.foundation.entry import RunConfig
from skyrl.errors import Problem
from skyrl.tree import FrozenDict, get_at
from skyrl.tree.access import default_at
from skyrl.tree.classes import leaf_paths
from skyrl.tree.plain import shown


@frozen
class Unimplemented:
    """One path, or every path inside one table, that no component reads yet."""

    path: str
    what: str
    """The capability that is missing."""

    runs: tuple[Any, ...] | None = None
    """Values that run, alone or several in a list. None: the defaults; other values are ignored, with a warning."""

    severity: Literal["error", "warning"] = field(
        default=Factory(lambda self: "warning" if self.runs is None else "error", True)
    )
    """Severity of the problem for other values: a warning if the run would be the same without them."""

    def leaves(self, root: type[Any]) -> dict[str, tuple[Any, ...]]:
        """Every leaf at or inside the path, and the values of it that run."""
        found = (path for path, _ in leaf_paths(root) if path == self.path or path.startswith(f"{self.path}."))
        return {path: (default_at(root, path),) if self.runs is None else self.runs for path in found}

    def check(self, run: RunConfig, leaves: Mapping[str, tuple[Any, ...]] | None = None) -> Iterator[Problem]:
        """Problems for values that no component implements. `leaves` are the leaves for the class of the run."""
        for path, runs in (self.leaves(run.__class__) if leaves is None else leaves).items():
            value = get_at(run, path)
            chosen = value if isinstance(value, tuple) and value else (value,)
            if not (_is_among(value, runs) or all(_is_among(each, runs) for each in chosen)):
                yield self._problem(path, value, runs)

    def _problem(self, path: str, value: object, runs: tuple[Any, ...]) -> Problem:
        verb = "does not run" if self.severity == "error" else "has no effect"
        return Problem(
            path=path,
            message=f"{shown(value)} {verb} in this version; not implemented yet: {self.what}",
            hint=f"supported: {' or '.join(_spelled(able) for able in runs)}",
            severity=self.severity,
        )


UNIMPLEMENTED: tuple[Unimplemented, ...] = ()
"""Settings of reinforcement learning that nothing reads yet: none."""


def _is_among(value: object, runs: tuple[Any, ...]) -> bool:
    return any(value == able and type(value) is type(able) for able in runs)


def _spelled(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value in ((), FrozenDict()):
        return "empty"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
