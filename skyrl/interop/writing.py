"""Builds our tree from a foreign file, one setting at a time, so that the outcome of each can be reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from skyrl.config import SkyRLTrainConfig, check
from skyrl.config.cluster import ClusterConfig
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import header_of
from skyrl.config.loading.migrations import MIGRATIONS
from skyrl.config.loading.resolve import derived, resolve_with_origins
from skyrl.config.loading.standalone_file import put
from skyrl.errors import NO_SUCH_FIELD, ConfigError, Problem
from skyrl.interop.report import Conversion, Line, OtherDefault, Outcome
from skyrl.interop.shell.unknown import with_dollars
from skyrl.interop.translation import Translation
from skyrl.tree import get_at
from skyrl.tree.arguments import split_path
from skyrl.tree.builder import ReadContext, TreeBuilder
from skyrl.tree.dump import stored_value
from skyrl.tree.masking import REFERENCE, is_secret_name
from skyrl.tree.origins import Assignment, Origin
from skyrl.tree.sparse import as_toml_has_it
from skyrl.tree.types import GIGABYTES, display_value

CLUSTER_FILE = "cluster.toml"
"""The file in reports, which name its fields as `cluster.toml:slurm.time`."""

_LARGEST = ("slurm.cpus_per_gpu", "slurm.memory_per_gpu")
"""Fields whose largest value over all processes is used."""

_VARIABLES = "variables."


class ClusterFile:
    """A draft of `cluster.toml`, to which several foreign settings may contribute to one field."""

    def __init__(self, where: str) -> None:
        """`where` names the foreign file in messages."""
        self._where = where
        self._values: dict[tuple[str, ...], Any] = {}

    def write(self, source: str, path: str, value: object) -> str:
        """Write a value to a path of the cluster's description. Returns the reason if that fails, else empty text."""
        is_variable = path.startswith(_VARIABLES)  # whose name may contain any character
        names = ("variables", path.removeprefix(_VARIABLES)) if is_variable else split_path(path)
        if is_variable and is_secret_name(names[-1].lower()):
            return f"looks like a secret, and would be written to disk: export {names[-1]} before the launch"
        merged = self._merged(path, names, value)
        if merged is None:
            other = display_value(self._values[names])
            return f"is {other} for other processes, but all processes of a run share one {path}"
        builder: TreeBuilder[Any] = TreeBuilder(ClusterConfig(), ReadContext())
        origin = Origin(kind="file", where=f"{self._where}: {source}")
        builder.assign(Assignment(path=names, value=merged, origin=origin))
        builder.build()
        if builder.problems:
            return f"{path}: {builder.problems[0].message}"
        self._values[names] = merged
        return ""

    def tables(self) -> dict[str, Any]:
        """The content of the TOML file as nested plain data."""
        tables: dict[str, Any] = {}
        for names, value in self._values.items():
            put(tables, names, value)
        return tables

    def _merged(self, path: str, names: tuple[str, ...], value: Any) -> Any:
        """The value merged with what other settings wrote to the path; None if they contradict each other."""
        earlier = self._values.get(names)
        if earlier is None or earlier == value:
            return value
        if path in _LARGEST:
            return max(earlier, value, key=_size)
        if isinstance(earlier, list):
            return [*earlier, *(item for item in value if item not in earlier)]
        return None


def _size(value: int | str) -> float:
    """A number, or a size with its unit in gigabytes."""
    return (GIGABYTES.read(value) or 0.0) if isinstance(value, str) else value


class Writing:
    """A draft of our tree, and the lines of the report."""

    def __init__(self, where: str, root: type[RunConfig] = SkyRLTrainConfig) -> None:
        """`root` is the class of the tree for one kind of run."""
        self._draft: TreeBuilder[Any] = TreeBuilder(root(), ReadContext(migrations=MIGRATIONS))
        self.root = root
        self.where = where
        self.written: dict[str, str] = {}
        """Our path -> the foreign key that wrote it."""
        self.resolved: Any = None
        """The finished run with derived values, as far as they can be derived."""
        self._references: dict[str, str] = {}  # our path -> `env:NAME`, for fields other than text
        self.lines: list[Line] = []
        self.cluster = ClusterFile(where)
        """The settings of the foreign file that concern machines rather than the run."""

    def note(self, line: Line) -> None:
        """Record the report line of a setting that writes nothing."""
        self.lines.append(evolve(line, value=with_dollars(line.value)))

    def write(
        self, source: str, path: str, value: object, *, text: bool = False
    ) -> tuple[tuple[str, ...], list[Problem]]:
        """Write a value to one of our paths, or to an older name of one. Returns the written paths and the problems."""
        value = with_dollars(value)
        before, count = len(self._draft.written), len(self._draft.problems)
        origin = Origin(kind="file", where=f"{self.where}: {source}")
        try:
            names = split_path(path)
        except ConfigError as error:
            return (), list(error.problems)
        self._draft.assign(Assignment(path=names, value=value, origin=origin, is_text=text))
        paths = tuple(dict.fromkeys(self._draft.written[before:]))
        self.written |= dict.fromkeys(paths, source)
        problems = self._draft.problems[count:]
        is_reference = isinstance(value, str) and REFERENCE.fullmatch(value) is not None
        if is_reference and problems and not any(problem.code in NO_SUCH_FIELD for problem in problems):
            self.undo_problems([problem for problem in problems if problem.severity == "error"])
            self._references[path] = str(value)  # read when the run starts, whatever type the field has
            return (path,), []
        return paths, problems

    def unresolved(self) -> Any:
        """The run so far, without derived values."""
        return self._draft.build()

    def undo_problems(self, problems: list[Problem]) -> None:
        """Discard the problems of an attempt that another one replaces."""
        for problem in problems:
            self._draft.problems.remove(problem)
            self._draft.broken.discard(problem.path)

    def finish(self, other_defaults: Callable[[Any], tuple[OtherDefault, ...]] = lambda run: ()) -> Conversion:
        """The tables without derived values, and the problems that `check` finds in the run.

        `other_defaults` compares the finished run, with derived values as far as they can be derived, with the defaults
        of settings that the foreign file omits.
        """
        run, origins = self._draft.build(), self._draft.origins
        self.resolved = run
        derivable: set[str] = set()  # written paths whose values would be derived anyway
        try:
            resolved, grown, broken = resolve_with_origins(run, origins)
        except ConfigError as error:  # values so absurd that nothing can be derived from them
            problems = error.problems
        else:
            self.resolved = resolved
            derivable = {path for path in derived(resolved) if path in origins and get_at(run, path) is not None}
            problems = tuple(check(resolved, grown, broken))
        tables: dict[str, Any] = dict(header_of(self.root))
        for path in origins:
            if path not in derivable:
                put(tables, split_path(path), _spelled(path, run))
        for path, reference in self._references.items():
            put(tables, split_path(path), reference)
        inexpressible = _drop_inexpressible(tables, self.root)
        sources = {self.written[path] for path in derivable if path in self.written}
        return Conversion(
            root=self.root,
            tables=tables,
            cluster=self.cluster.tables(),
            lines=tuple(
                _final(line, derivable if line.source in sources else set(), inexpressible) for line in self.lines
            ),
            problems=problems,
            other_defaults=other_defaults(self.resolved),
        )


def _final(line: Line, derivable: set[str], inexpressible: set[str]) -> Line:
    """The line, marked as derived if all its paths follow from the rest, and as refused if TOML cannot express one."""
    if inexpressible.intersection(line.targets):
        return evolve(line, outcome="refused", reason="null, which TOML cannot express in this table")
    if line.targets and derivable.issuperset(line.targets) and line.outcome in ("kept", "renamed"):
        return evolve(line, outcome="derived")
    return line


def _drop_inexpressible(tables: dict[str, Any], root: type[RunConfig]) -> set[str]:
    """Remove nulls inside free-form tables from `tables`. Returns their paths."""
    try:
        as_toml_has_it(tables, root)
        return set()
    except ConfigError as error:
        paths = {problem.path for problem in error.problems}
    for path in paths:
        *names, last = split_path(path)
        table: Any = tables
        for name in names:
            table = table[name] if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table.pop(last, None)
    return paths


def _spelled(path: str, run: RunConfig) -> Any:
    value: Any = run
    for name in split_path(path):
        value = value.get(name) if hasattr(value, "get") else getattr(value, name)
    if path == "trainer.resume_mode" and value is None:
        return "none"  # both mean: start from scratch, and TOML has no null
    return stored_value(value)


def apply(writing: Writing, key: str, value: object, translation: Translation) -> None:
    """Write the translation of a setting, and record it in the report."""
    reasons: dict[Outcome, str] = {
        "refused": translation.refused,
        "not yet": translation.unsupported,
        "needless": translation.redundant,
    }
    for outcome, reason in reasons.items():
        if reason:
            writing.note(Line(outcome=outcome, source=key, value=value, reason=reason))
            return
    written: list[str] = []
    for path, ours in translation.writes.items():
        paths, problems = writing.write(key, path, ours)
        errors = [problem for problem in problems if problem.severity == "error"]
        if errors:
            writing.note(Line(outcome="refused", source=key, value=value, reason=f"{path}: {errors[0].message}"))
            return
        written += paths
    for path, ours in translation.cluster.items():
        if reason := writing.cluster.write(key, path, with_dollars(ours)):
            writing.note(Line(outcome="refused", source=key, value=value, reason=reason))
            return
        written.append(f"{CLUSTER_FILE}:{path}")
    written += [translation.command] if translation.command else []
    writing.note(
        Line(
            outcome="kept" if written == [key] else "renamed",
            source=key,
            value=value,
            targets=tuple(written),
            reason=translation.note,
        )
    )
