"""The engine of `resolve()` and `check()`: derivation rules and checks are small named functions in a tuple.

A rule fills one path that was left unset, from the paths that it says it reads. A check looks at the whole tree and
yields problems. Both are skipped where a value they read could not be used, so that one mistake is reported once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree.access import evolve_at, get_at
from skyrl.tree.origins import DEFAULT, Origin, Origins, place_of, written_paths

T = TypeVar("T")

Check = Callable[[T], Iterator[Problem]]
"""Reads the resolved tree, yields what is wrong with it. Its docstring says in one sentence what must hold."""


@attrs.frozen(kw_only=True)
class Rule(Generic[T]):
    """One derivation: the path it writes, the paths it reads, and the function that computes the value."""

    writes: str
    reads: tuple[str, ...]
    unset: Any
    """The value that means "derive this": None in almost every field."""

    placeholder: bool
    """Writing `unset` by hand asks for derivation, too. False where it is an ordinary value, such as 2.0."""

    compute: Callable[[T], Any]

    table: str
    """Optional table that the path is in, where it is in one. The rule applies where that table is absent or was
    written leaf by leaf; one that was given whole, as an instance, stands as it is."""

    given: str
    """Path without which the rule does not apply: it has to be written, or in a bare tree to differ from what another
    rule would derive for it."""

    asks_machine: bool
    """Whether the value depends on the machine too, so that a stored tree keeps it."""

    @property
    def name(self) -> str:
        """The function's name, which says what follows from what."""
        return self.compute.__name__

    def applies(self, config: T, written: Collection[str]) -> bool:
        """Is the path still unset? `written` are the paths that a person wrote."""
        if self.table and get_at(config, self.table) is None:
            return True
        return self.leaves_unset(get_at(config, self.writes)) and (self.placeholder or self.writes not in written)

    def leaves_unset(self, value: object) -> bool:
        """Does this value mean "derive it"?"""
        return type(value) is type(self.unset) and bool(value == self.unset)

    def below(self, table: str) -> Rule[Any]:
        """The same rule in a larger tree, in which what it reads and writes is inside the table at the path `table`."""
        return attrs.evolve(
            cast("Rule[Any]", self),
            writes=f"{table}.{self.writes}",
            reads=tuple(f"{table}.{path}" for path in self.reads),
            table=f"{table}.{self.table}" if self.table else "",
            given=f"{table}.{self.given}" if self.given else "",
            compute=_of_table(table, self.compute),
        )


@attrs.frozen
class Effect:
    """A field that acts under a condition only: one path, or every path inside a table."""

    path: str
    when: str
    """The condition in words, after "acts only when"."""

    acts: Callable[[Any], bool]
    """The condition for a resolved tree."""

    def below(self, table: str) -> Effect:
        """The same in a larger tree, in which the field is inside the table at the path `table`."""
        return Effect(f"{table}.{self.path}", self.when, _of_table(table, self.acts))


def rule(
    *,
    writes: str,
    reads: Sequence[str],
    unset: object = None,
    placeholder: bool = True,
    table: str = "",
    given: str = "",
    asks_machine: bool = False,
) -> Callable[[Callable[[T], Any]], Rule[T]]:
    """Make a function from tree to value a rule. Returning the `unset` value leaves the path as it is."""

    def decorate(compute: Callable[[T], Any]) -> Rule[T]:
        return Rule(
            writes=writes,
            reads=tuple(reads),
            unset=unset,
            placeholder=placeholder,
            compute=compute,
            table=table,
            given=given,
            asks_machine=asks_machine,
        )

    return decorate


def _of_table(table: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def of_table(tree: object) -> Any:
        return function(get_at(tree, table))

    return of_table


def derive(
    config: T, rules: Sequence[Rule[T]], origins: Origins, broken: Iterable[str] = (), *, leaf_by_leaf: bool = False
) -> tuple[T, Origins, frozenset[str]]:
    """Apply the rules in order: a new tree, its origins, and the broken paths.

    What was derived has a `rule` origin; what would have been derived from a broken path is broken, too. With
    `leaf_by_leaf`, optional tables count as written that way: those of a stored tree, whose origins are not known.
    """
    out_of_use = set(broken)
    grown, written = dict(origins), written_paths(origins)
    whole = set() if leaf_by_leaf else _given_whole(config, {step.table for step in rules if step.table}, origins)
    for step in rules:
        if step.table in whole or not step.applies(config, written):
            continue
        if step.given and not (step.given in written if origins else _differs(config, step.given, rules)):
            continue
        if touches([*step.reads, step.writes], out_of_use):
            out_of_use.add(step.writes)
            continue
        value = step.compute(config)
        if step.leaves_unset(value):
            continue
        config = _written(config, step, value)
        origin = Origin(kind="rule", where=step.name, reads=step.reads, value=value)
        grown[step.writes] = (*grown.get(step.writes, (DEFAULT,)), origin)
    return config, grown, frozenset(out_of_use)


def _differs(config: T, path: str, rules: Iterable[Rule[T]]) -> bool:
    """Is there a value at the path that no rule would have given?"""
    value = get_at(config, path)
    return all(not step.leaves_unset(value) and value != step.compute(config) for step in rules if step.writes == path)


def taken_as_written(rules: Iterable[Rule[Any]], derived: Collection[str]) -> Origins:
    """Origins of a stored tree: of the paths that some rule wants to be written, those that were not derived were."""
    return {step.given: (Origin(kind="file"),) for step in rules if step.given and step.given not in derived}


def _given_whole(config: object, tables: Iterable[str], origins: Origins) -> set[str]:
    """The tables that are there as one instance, from Python or as a class's default, and not from their leaves."""
    there = [table for table in tables if get_at(config, table) is not None]
    by_leaf = {table for table in there if any(f"{path}.".startswith(f"{table}.") for path in origins)}
    as_one = {table for table in by_leaf if table in origins and attrs.has(type(origins[table][-1].value))}
    return {table for table in there if table not in by_leaf or table in as_one}


def _written(config: T, step: Rule[T], value: object) -> T:
    try:
        return evolve_at(config, step.writes, value)
    except ConfigError as error:  # the values that it follows from are absurd, if each of them is allowed
        hint = f"it follows from {', '.join(step.reads)}"
        raise ConfigError([attrs.evolve(each, path=step.writes, hint=hint) for each in error.problems]) from None


def derived_paths(config: T, rules: Sequence[Rule[T]]) -> tuple[str, ...]:
    """The paths whose value the rules would give again if it were not there: a stored tree need not keep them.

    A value that depends on the machine is kept, since that may be another one later: of a rule that reads no path, or
    that says so.
    """
    lasting = [step for step in rules if (step.reads or step.table) and not step.asks_machine]
    present = [step for step in lasting if get_at(config, step.writes) != step.unset]
    candidates = {step.writes: step for step in present}
    while True:
        bare = config
        for path, step in candidates.items():
            bare = evolve_at(bare, path, step.unset)
        again = derive(bare, rules, taken_as_written(rules, candidates), leaf_by_leaf=True)[0]
        other = [step for path, step in candidates.items() if not _alike(get_at(again, path), get_at(config, path))]
        by_hand = {step.given if step.given in candidates else step.writes for step in _roots(other)}
        if not by_hand:
            whole = tuple(_derived_tables(config, rules, candidates))
            return (*whole, *(path for path, step in candidates.items() if step.table not in whole))
        candidates = {path: step for path, step in candidates.items() if path not in by_hand}


def _roots(steps: Sequence[Rule[T]]) -> list[Rule[T]]:
    """Problems that read nothing that another one of them writes: the others may differ for that alone."""
    written = {step.writes for step in steps}
    return [step for step in steps if not written & {*step.reads}] or list(steps)


def _derived_tables(config: T, rules: Sequence[Rule[T]], derived: Collection[str]) -> Iterator[str]:
    """Optional tables that the rules would give again as a whole."""
    for table in dict.fromkeys(step.table for step in rules if step.table and step.writes in derived):
        again = derive(evolve_at(config, table, None), rules, {}, leaf_by_leaf=True)[0]
        if _alike(get_at(again, table), get_at(config, table)):
            yield table


def _alike(one: object, other: object) -> bool:
    return type(one) is type(other) and bool(one == other)


def find_problems(config: T, checks: Iterable[Check[T]], origins: Origins, broken: Iterable[str] = ()) -> list[Problem]:
    """Problems of every check, each with the place of the value that it is about."""
    out_of_use = set(broken)
    found = []
    for check in checks:
        reads: set[str] = set()
        watched: Any = _Watched(config, "", reads) if out_of_use else config  # watching takes twice the time
        problems = list(check(watched))
        if not touches(reads, out_of_use):
            found += [attrs.evolve(each, place=each.place or place_of(each.path, origins)) for each in problems]
    return found


def paths_read(function: Callable[[Any], Any], config: object) -> set[str]:
    """The dotted leaf paths that `function` reads of `config`."""
    reads: set[str] = set()
    result = function(_Watched(config, "", reads))
    if isinstance(result, Iterator):
        list(result)
    return reads


def itself(config: T) -> T:
    """The tree that a rule or check was given, for one that tries changes of it: all of it counts as read, so that the
    check is skipped where any value is broken.
    """
    if not isinstance(config, _Watched):
        return config
    tree: T = config.everything()
    return tree


def touches(paths: Iterable[str], broken: Collection[str]) -> bool:
    """Does any of the paths lie at, in, or around a broken one? The empty path is the root: everything is in it."""
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
    """Stands in for a tree and notes which leaves are read."""

    def __init__(self, config: object, path: str, reads: set[str]) -> None:
        self._config, self._path, self._reads = config, path, reads

    def everything(self) -> Any:
        """The tree itself, every leaf of which may be read from now on."""
        self._reads.add(self._path)
        return self._config

    @property  # type: ignore[misc]  # `isinstance` answers as for the tree itself
    def __class__(self) -> type[Any]:
        return type(self._config)

    def __getattr__(self, name: str) -> Any:
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

    __hash__ = None  # type: ignore[assignment]  # nothing keeps these
