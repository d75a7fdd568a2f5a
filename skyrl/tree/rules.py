"""The engine of `resolve()` and `check()`: derivation rules and checks are small named functions in a tuple.

A rule fills one path that was left unset, from the paths that it declares to read. A check looks at the whole tree and
yields problems. Both are skipped if a value they read is invalid, so that one mistake is reported once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, Generic, TypeVar, cast

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree.access import evolve_at, get_at, is_written, mark_derived
from skyrl.tree.classes import fields_of, written_fields
from skyrl.tree.origins import DEFAULT, Origin, Origins, place_of, written_paths

T = TypeVar("T")

Check = Callable[[T], Iterator[Problem]]
"""A function that reads the resolved tree and yields problems. Its docstring states in one sentence what must hold."""


@attrs.frozen(kw_only=True)
class Rule(Generic[T]):
    """One derivation: the path it writes, the paths it reads, and the function that computes the value."""

    writes: str
    reads: tuple[str, ...]
    unset: Any
    """The value that means "derive this": None in almost every field."""

    placeholder: bool
    """Whether writing `unset` explicitly also requests derivation. False if it is an ordinary value, such as 2.0."""

    compute: Callable[[T], Any]

    table: str
    """Optional table that contains the path, if any. The rule applies if that table is absent or was written leaf by
    leaf; a table given as a whole instance is left unchanged."""

    asks_machine: bool
    """Whether the value also depends on the machine, so that a stored tree keeps it."""

    @property
    def name(self) -> str:
        """The function's name, which says what follows from what."""
        return self.compute.__name__

    @property
    def reason(self) -> str:
        """The function's docstring in one line, which says why."""
        return " ".join((self.compute.__doc__ or "").split())

    def applies(self, config: T, written: Collection[str]) -> bool:
        """Is the path still unset? `written` are the paths that were written explicitly."""
        if self.table and get_at(config, self.table) is None:
            return True
        if not self.leaves_unset(get_at(config, self.writes)):
            return False
        return self.placeholder or not (self.writes in written or is_written(config, self.writes))

    def leaves_unset(self, value: object) -> bool:
        """Does this value mean "derive it"?"""
        return type(value) is type(self.unset) and bool(value == self.unset)

    def below(self, table: str) -> Rule[Any]:
        """The same rule for a larger tree, with its paths inside the table at `table`."""
        return attrs.evolve(
            cast("Rule[Any]", self),
            writes=f"{table}.{self.writes}",
            reads=tuple(f"{table}.{path}" for path in self.reads),
            table=f"{table}.{self.table}" if self.table else "",
            compute=_applied_to_table(table, self.compute),
        )


@attrs.frozen
class Condition:
    """A predicate of a resolved tree that carries its sentence, from which warnings and documentation follow.

    Example: `is_one("trainer.strategy", "fsdp2") & Condition("there are several ranks", lambda run: ranks(run) > 1)`
    """

    words: str
    """The condition in words, after "acts only when"."""

    holds: Callable[[Any], bool]

    def __and__(self, other: Condition) -> Condition:
        return all_of(self, other)

    def __or__(self, other: Condition) -> Condition:
        return Condition(f"{self.words}, or {other.words}", lambda config: self.holds(config) or other.holds(config))

    def below(self, table: str) -> Condition:
        """The same condition of a larger tree, for the table at `table`."""
        return Condition(self.words, _applied_to_table(table, self.holds))


def all_of(*conditions: Condition) -> Condition:
    """The condition that all conditions hold: "a, b and c"."""
    words = join_choices([item.words for item in conditions], "and")
    return Condition(words, lambda config: all(entry.holds(config) for entry in conditions))


def condition(words: str) -> Callable[[Callable[[Any], bool]], Condition]:
    """Turn a function from tree to truth into a condition with this sentence."""
    return lambda holds: Condition(words, holds)


def is_on(path: str) -> Condition:
    """The field is true: "use_tis is on"."""
    return Condition(f"{_last_name(path)} is on", lambda config: bool(get_at(config, path)))


def is_given(path: str, name: str = "") -> Condition:
    """The field is not None: "buffer_len is given". `name` is how the sentence calls the field."""
    return Condition(f"{name or _last_name(path)} is given", lambda config: get_at(config, path) is not None)


def is_one(path: str, *values: object, name: str = "") -> Condition:
    """The field has one of the values: "scheduler is cosine or linear"."""
    words = join_choices(values, "or")
    return Condition(f"{name or _last_name(path)} is {words}", lambda config: get_at(config, path) in values)


def join_choices(items: Sequence[object], join: str) -> str:
    """`a, b or c`."""
    *most, last = map(str, items)
    return f"{', '.join(most)} {join} {last}" if most else last


def _last_name(path: str) -> str:
    return path.rpartition(".")[2]


@attrs.frozen
class Effect:
    """A field, or every field of a table, that has an effect only under a condition."""

    path: str
    condition: Condition

    def covers(self, path: str) -> bool:
        """Whether it is the effect of a path, or of a table that contains it."""
        return f"{path}.".startswith(f"{self.path}.")

    def below(self, table: str) -> Effect:
        """The same effect for a larger tree, with the field inside the table at `table`."""
        return Effect(f"{table}.{self.path}", self.condition.below(table))


def effects(condition: Condition, *paths: str) -> tuple[Effect, ...]:
    """Effects of fields that act under one condition."""
    return tuple(Effect(path, condition) for path in paths)


def fields_in(table: str, names: str) -> tuple[str, ...]:
    """Paths of fields of one table: `fields_in("generator", "batched chat_template")`."""
    return tuple(f"{table}.{name}" for name in names.split())


def rule(
    *,
    writes: str,
    reads: Sequence[str],
    unset: object = None,
    placeholder: bool = True,
    table: str = "",
    asks_machine: bool = False,
) -> Callable[[Callable[[T], Any]], Rule[T]]:
    """Turn a function from tree to value into a rule. Returning the `unset` value leaves the path unchanged."""

    def decorate(compute: Callable[[T], Any]) -> Rule[T]:
        return Rule(
            writes=writes,
            reads=tuple(reads),
            unset=unset,
            placeholder=placeholder,
            compute=compute,
            table=table,
            asks_machine=asks_machine,
        )

    return decorate


def _applied_to_table(table: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def of_table(tree: object) -> Any:
        return function(get_at(tree, table))

    return of_table


def derive(
    config: T, rules: Sequence[Rule[T]], origins: Origins, broken: Iterable[str] = (), *, leaf_by_leaf: bool = False
) -> tuple[T, Origins, frozenset[str]]:
    """Apply the rules in order. Returns a new tree, its origins, and the broken paths.

    A derived value has a `rule` origin; a value that would be derived from a broken path is broken, too. With
    `leaf_by_leaf`, optional tables count as written leaf by leaf: used for stored trees, whose origins are unknown.
    """
    out_of_use = set(broken)
    grown, written = dict(origins), written_paths(origins)
    tables = {step.table for step in rules if step.table}
    complete_tables = set() if leaf_by_leaf else _given_whole(config, tables, origins)
    for step in rules:
        if step.table in complete_tables or not step.applies(config, written):
            continue
        if touches([*step.reads, step.writes], out_of_use):
            out_of_use.add(step.writes)
            continue
        value = step.compute(config)
        if step.leaves_unset(value):
            continue
        config = _write_derived(config, step, value)
        origin = Origin(kind="rule", where=step.name, reads=step.reads, value=value)
        grown[step.writes] = (*grown.get(step.writes, (DEFAULT,)), origin)
    return config, grown, frozenset(out_of_use)


def _given_whole(config: object, tables: Iterable[str], origins: Origins) -> set[str]:
    """The tables that were given as one instance, from Python or as a class's default, rather than leaf by leaf."""
    present = {table: value for table in tables if (value := get_at(config, table)) is not None}
    if written_fields(config) is not None:  # each table of a loaded tree says so itself
        return {table for table, value in present.items() if is_whole(value)}
    by_leaf = {table for table in present if any(f"{path}.".startswith(f"{table}.") for path in origins)}
    as_one = {table for table in by_leaf if table in origins and attrs.has(type(origins[table][-1].value))}
    return {table for table in present if table not in by_leaf or table in as_one}


def is_whole(table: object) -> bool:
    """Was this table of a loaded tree given as one instance?"""
    names = written_fields(table)
    return names is None or names >= fields_of(type(table)).keys()


def _write_derived(config: T, step: Rule[T], value: object) -> T:
    if is_written(config, step.writes):  # what was written there asks for derivation
        config = mark_derived(config, step.writes)
    try:
        return evolve_at(config, step.writes, value)
    except ConfigError as error:  # the values that it follows from are each allowed, but absurd in combination
        hint = f"derived from {', '.join(step.reads)}"
        raise ConfigError([attrs.evolve(problem, path=step.writes, hint=hint) for problem in error.problems]) from None


def derived_paths(config: T, rules: Sequence[Rule[T]]) -> tuple[str, ...]:
    """The paths whose value the rules would derive again if it were missing: a stored tree need not keep them.

    Values that depend on the machine are not among them, since the machine may change: those of a rule that reads no
    path, or that sets `asks_machine`. Neither are values that somebody wrote, as far as the tree says so.
    """
    candidates = {
        step.writes: step
        for step in rules
        if (step.reads or step.table)
        and not (step.asks_machine or is_written(config, step.writes))
        and get_at(config, step.writes) != step.unset
    }
    while True:
        bare = config
        for path, step in candidates.items():
            bare = evolve_at(bare, path, step.unset)
        rederived = derive(bare, rules, {}, leaf_by_leaf=True)[0]
        other = [step for path, step in candidates.items() if not _alike(get_at(rederived, path), get_at(config, path))]
        written = {step.writes for step in other}
        # Those that read nothing that another of them writes; the others may differ only as a consequence.
        roots = [step for step in other if not written & {*step.reads}] or other
        by_hand = {step.writes for step in roots}
        if not by_hand:
            tables = tuple(_derived_tables(config, rules, candidates))
            return (*tables, *(path for path, step in candidates.items() if step.table not in tables))
        candidates = {path: step for path, step in candidates.items() if path not in by_hand}


def _derived_tables(config: T, rules: Sequence[Rule[T]], derived: Collection[str]) -> Iterator[str]:
    """Optional tables that the rules would derive again as a whole."""
    for table in dict.fromkeys(step.table for step in rules if step.table and step.writes in derived):
        if written_fields(get_at(config, table)):
            continue
        rederived = derive(evolve_at(config, table, None), rules, {}, leaf_by_leaf=True)[0]
        if _alike(get_at(rederived, table), get_at(config, table)):
            yield table


def _alike(one: object, other: object) -> bool:
    return type(one) is type(other) and bool(one == other)


def find_problems(config: T, checks: Iterable[Check[T]], origins: Origins, broken: Iterable[str] = ()) -> list[Problem]:
    """Problems of every check, each with the place of the value that it is about."""
    out_of_use = set(broken)
    all_problems = []
    for check in checks:
        reads: set[str] = set()
        watched: Any = _Watched(config, "", reads) if out_of_use else config  # watching doubles the time
        problems = list(check(watched))
        if not touches(reads, out_of_use):
            all_problems += [
                attrs.evolve(problem, location=problem.location or place_of(problem.path, origins))
                for problem in problems
            ]
    return all_problems


def paths_read(function: Callable[[Any], Any], config: object) -> set[str]:
    """The dotted leaf paths that `function` reads of `config`."""
    reads: set[str] = set()
    result = function(_Watched(config, "", reads))
    if isinstance(result, Iterator):
        list(result)
    return reads


def itself(config: T) -> T:
    """The plain tree behind the one that a rule or check receives, for checks that try changes of it once they have
    read what decides. Nothing of it counts as read.
    """
    if not isinstance(config, _Watched):
        return config
    tree: T = object.__getattribute__(config, "_config")
    return tree


def touches(paths: Iterable[str], broken: Collection[str]) -> bool:
    """Is any of the paths equal to, inside, or around a broken one? The empty path is the root, which contains all."""
    if not broken:
        return False
    around = {above for bad in broken for above in _and_around(bad)}
    return any(path in around or any(above in broken for above in _and_around(path)) for path in paths)


def _and_around(path: str) -> Iterator[str]:
    """The path, every table around it, and the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


class _Watched:
    """Stands in for a tree and records which leaves are read."""

    def __init__(self, config: object, path: str, reads: set[str]) -> None:
        self._config, self._path, self._reads = config, path, reads

    @property  # type: ignore[misc]  # `isinstance` answers as for the tree itself
    def __class__(self) -> type[Any]:
        return type(self._config)

    def __getattr__(self, name: str) -> Any:
        derived = getattr(type(self._config), name, None)  # reads fields, which are recorded
        if isinstance(derived, property | FunctionType):
            return derived.__get__(self)
        value = getattr(self._config, name)
        path = f"{self._path}.{name}" if self._path else name
        if attrs.has(type(value)):
            return _Watched(value, path, self._reads)
        self._reads.add(path)
        return value

    def __eq__(self, other: object) -> bool:
        self._reads.add(self._path)
        return bool(self._config == (other._config if isinstance(other, _Watched) else other))

    def __repr__(self) -> str:
        self._reads.add(self._path)
        return repr(self._config)

    __hash__ = None  # type: ignore[assignment]  # not hashable: never used as a key
