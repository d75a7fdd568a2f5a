"""Explanation of one path of a loaded tree: its meaning, the origin of its value, and the values that depend on it.

This module returns data; `skyrl config explain` prints it.
"""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.foreign_names import names_elsewhere
from skyrl.config.loading.kinds import kind_of
from skyrl.config.loading.migrations import MIGRATIONS
from skyrl.errors import ConfigError, Problem
from skyrl.tree import get_at
from skyrl.tree.arguments import split_path
from skyrl.tree.classes import docs_of, fields_of, table_class
from skyrl.tree.dump import flatten, public_value, stored_value
from skyrl.tree.masking import is_secret_name, masked
from skyrl.tree.migrations import current_path
from skyrl.tree.origins import Origins, Path, dotted, place_of
from skyrl.tree.rules import outcome, paths_read, touches
from skyrl.tree.suggestions import suggestion
from skyrl.tree.types import describe, is_mapping
from skyrl.tree.validators import requirement_of


@frozen(kw_only=True)
class ValueOrigin:
    """One origin of the value. The last one wins."""

    location: str
    """`default`, `run.toml:14`, `argument 2`, `derived by <rule>`."""

    value: Any
    because: str = ""
    """Reason of a rule's derivation, in a sentence."""

    reads: tuple[tuple[str, Any, str], ...] = ()
    """Paths that a rule read, each with its value and where that came from."""


@frozen(kw_only=True)
class Explanation:
    """Explanation of one path."""

    path: str
    value: Any
    type: str
    allowed: str
    """Constraint beyond the type, in words, such as a range; empty for none."""

    doc: str
    chain: tuple[ValueOrigin, ...]
    feeds: tuple[tuple[str, str], ...]
    """Paths that are derived from it, each with the name of the rule."""

    acts_when: str
    """Conditions under which the field has an effect, or those of them that are not met; empty for always."""

    acts: bool | None
    """None if that depends on `unread_code`."""

    unread_code: tuple[str, ...]
    """Import paths of the run that were not imported and decide on the conditions."""

    checks: tuple[tuple[str, str], ...]
    """Checks that read it: the name, and what must hold."""


def explain(path: str, run: RunConfig, origins: Origins) -> Explanation:
    """The explanation of `path` in the resolved tree `run`, whose origins include those of the rules. A former name of
    a field stands for its current one.

    Raises `ConfigError` for a path that does not exist.
    """
    names = current_path(MIGRATIONS, split_path(path)) or split_path(path)
    path = dotted(names)
    attribute, depth, doc = _field(names, run)
    kind = kind_of(run)
    unread = kind.unread_code(run)
    conditions = [effect.condition for effect in kind.effects if effect.covers(path)]
    outcomes = [outcome(condition, run, unread) for condition in conditions]
    acts = False if False in outcomes else None if None in outcomes else True
    decisive = [condition for condition, result in zip(conditions, outcomes, strict=True) if result is acts]
    return Explanation(
        path=path,
        value=_printable(_value(run, names), names[depth:]),
        type=describe(attribute.type),
        allowed=requirement_of(attribute.validator) if depth == len(names) else "",
        doc=doc,
        chain=_chain(path, names, depth, run, origins),
        feeds=tuple((rule.writes, rule.name) for rule in kind.rules if touches([path], rule.reads)),
        acts_when=", and ".join(dict.fromkeys(condition.words for condition in decisive)),
        acts=acts,
        unread_code=tuple(
            name
            for table, name in unread.items()
            if acts is None and any(touches(paths_read(condition.holds, run), [table]) for condition in decisive)
        ),
        checks=tuple(
            (getattr(check, "__name__", ""), " ".join((check.__doc__ or "").split()))
            for check in kind.checks
            if touches([path], paths_read(check, run))
        ),
    )


def _field(names: Path, run: RunConfig) -> tuple[attrs.Attribute[Any], int, str]:
    """The field at a path, or the free-form table that the path leads into, how far that is, and its documentation."""
    table: Any = run
    for depth, name in enumerate(names):
        owner = type(table)
        attribute = fields_of(owner).get(name)
        if attribute is None:
            sentence, _ = suggestion(type(run), owner, names, depth, names_elsewhere)
            raise ConfigError([Problem(path=dotted(names), message="no such field", hint=sentence)], title=_TITLE)
        value = getattr(table, name)
        nested = table_class(attribute, value)
        if nested is None and depth + 1 < len(names) and not is_mapping(attribute.type):
            message = f"no such field: {dotted(names[: depth + 1])} is {describe(attribute.type)}"
            raise ConfigError([Problem(path=dotted(names), message=message)], title=_TITLE)
        if nested is None or depth + 1 == len(names):
            break
        table = nested() if value is None else value
    assert attribute is not None  # a path has a name, which was found
    return attribute, depth + 1, docs_of(owner).get(name, "")


_TITLE = "There is nothing to explain"


def _value(run: object, names: Path) -> object:
    value: Any = run
    for name in names:
        if value is None:
            return None
        value = value.get(name) if hasattr(value, "get") else getattr(value, name)
    return value


def _default(run: RunConfig, names: Path) -> ValueOrigin:
    """The value if nothing is written; in a table of another class, or one that is null by default but present, the
    default of its class.
    """
    default: Any = type(run)()
    table: Any = run
    place = "default"
    for depth, name in enumerate(names[:-1]):
        table, default = getattr(table, name, None), getattr(default, name, None)
        if not attrs.has(type(table)):
            return ValueOrigin(location=place, value=_printable(_value(default, names[depth + 1 :])))
        if type(default) is not type(table):
            place = f"default of {type(table).__name__}" if default is None else place
            default = type(table)()
    return ValueOrigin(location=place, value=_printable(_value(default, names[-1:])))


def _chain(path: str, names: Path, depth: int, run: RunConfig, origins: Origins) -> tuple[ValueOrigin, ...]:
    """Every origin of the value; the names from `depth` on are keys of a free-form table."""
    chain = origins.get(path, ())
    default = _default(run, names)
    steps = [] if chain and chain[0].kind == "default" else [default]
    by_name = {rule.name: rule for rule in kind_of(run).rules}
    for origin in chain:
        if origin.kind == "default" and not origin.where:
            steps.append(default)
            continue
        rule = by_name.get(origin.where) if origin.kind == "rule" else None
        reads = [(read, _printable(get_at(run, read)), place_of(read, origins) or "default") for read in origin.reads]
        steps.append(
            ValueOrigin(
                location=origin.location or "default",
                value=_printable(origin.value, names[depth:]),
                because=rule.reason if rule else "",
                reads=tuple(reads),
            )
        )
    return tuple(steps)


def _printable(value: object, keys: Path = ()) -> object:
    """The value without secrets, for printing; `keys` lead to it inside a free-form table."""
    if attrs.has(type(value)):
        return flatten(value, leaf=public_value)
    name = next(filter(is_secret_name, keys), "")
    return masked(stored_value(value), name) if name else public_value(value)
