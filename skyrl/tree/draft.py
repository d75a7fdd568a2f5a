"""Patching the default instance: assignments go onto it one by one, and a new frozen tree comes out.

The default *instance*, not the default class: `critic.optimizer_config.weight_decay=0.2` must leave lr at the 5e-6 that
the critic's default instance has. Everything that is wrong is collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree.classes import class_name, fields_of, fit_field, known_class
from skyrl.tree.frozen import thaw
from skyrl.tree.literals import NULL_WORDS
from skyrl.tree.names import suggestion
from skyrl.tree.origins import Assignment, Origin, Origins, Path, dotted, place_of
from skyrl.tree.plain import shown
from skyrl.tree.types import config_class, describe, fit, is_mapping, is_optional, parse, value_kind

T = TypeVar("T")


class Draft(Generic[T]):
    """A tree while it is being written. `build()` gives the frozen result; `problems` and `origins` what happened.

    A value that does not fit keeps the field at what it was, so that the rest can still be judged; `broken` names the
    field, or the fields that a misspelled name may have meant.
    """

    def __init__(self, base: T) -> None:
        self._root = _Table(type(base), base)
        self._origins: dict[str, list[Origin]] = {}
        self.problems: list[Problem] = []
        self.broken: set[str] = set()

    @property
    def origins(self) -> Origins:
        """Dotted path -> its origins, winner last."""
        return {path: tuple(chain) for path, chain in self._origins.items()}

    def assign_all(self, assignments: Iterable[Assignment]) -> None:
        """Assign in order; a later assignment to the same path wins."""
        for assignment in assignments:
            self.assign(assignment)

    def assign(self, assignment: Assignment) -> None:
        """Put one value in its place, or note why it cannot stand there."""
        try:
            self._assign(self._root, 0, assignment)
        except ValueError as error:
            path = dotted(assignment.path)
            self.broken.add(path)
            for problem in _problems(error):
                self.problems.append(attrs.evolve(problem, path=path, place=assignment.origin.place))

    def build(self) -> T:
        """The patched tree. What a class refuses as a whole keeps the table at what it was."""
        return cast(T, self._build(self._root, ()))

    def _assign(self, table: _Table, depth: int, assignment: Assignment) -> None:
        """Go down to the table or field that the path names: `depth` of its names led to `table`."""
        path = assignment.path
        if depth == len(path):
            self._merge(table, assignment)
            return
        name, last = path[depth], depth + 1 == len(path)
        attribute = fields_of(table.cls).get(name)
        if attribute is None and name == "class" and last:
            table.become(assignment.value)
        elif attribute is None:
            self._refuse_unknown(table, depth, path)
        elif nested := config_class(attribute.type):
            if not (last and self._replace(table, attribute, nested, assignment)):
                self._assign(table.child(name, nested), depth + 1, assignment)
        elif last:
            self._set(table, attribute, assignment)
        elif is_mapping(attribute.type):
            self._set_inside(table, attribute, depth, assignment)
        else:
            owner = dotted(path[: depth + 1])
            raise _refusal(f"no such field: {owner} is {describe(attribute.type)}")

    def _merge(self, table: _Table, assignment: Assignment) -> None:
        """A mapping assigned to a table: each key on its own, with its own origin; `class` first."""
        value = parse(assignment.value, table.cls) if assignment.is_text else assignment.value
        if not isinstance(value, Mapping):
            raise _refusal(f"{shown(value)} is not {describe(table.cls)}")
        for key in sorted(value, key=lambda key: key != "class"):
            self.assign(assignment.inside(str(key), value[key]))

    def _replace(self, table: _Table, attribute: Any, nested: type[Any], assignment: Assignment) -> bool:
        """Null, or an instance, takes the place of a whole table; says whether it was one."""
        value = assignment.value
        null = value is None or (isinstance(value, str) and value in (NULL_WORDS if assignment.is_text else ("none",)))
        if null and is_optional(attribute.type):
            table.changes[attribute.name] = None
        elif isinstance(value, nested):
            table.changes[attribute.name] = fit(value, nested)
        else:
            return False
        self._forget_inside(assignment.path)
        self._record(assignment)
        for path in _written_in(value, assignment.path):
            self._origins[dotted(path)] = [assignment.origin]
        return True

    def _set(self, table: _Table, attribute: Any, assignment: Assignment) -> None:
        value = assignment.value
        if assignment.is_text or is_mapping(attribute.type):
            value = _read(assignment, attribute.type)
        if isinstance(value, Mapping) and (value or table.current(attribute.name) is not None):
            for key, item in value.items():
                self.assign(assignment.inside(key, item))
        else:
            table.changes[attribute.name] = _accepted(attribute, value, table.base)
            if is_mapping(attribute.type):
                self._forget_inside(assignment.path)
            self._record(assignment)

    def _set_inside(self, table: _Table, attribute: Any, depth: int, assignment: Assignment) -> None:
        """`dict_field.a.b = value`: a key inside a free-form table."""
        *parents, key = assignment.path[depth + 1 :]
        value = _read(assignment, Any if parents else value_kind(attribute.type))
        if isinstance(value, Mapping) and value:
            for inner, item in value.items():
                self.assign(assignment.inside(inner, item))
            return
        holder = table.mapping(attribute.name)
        for name in parents:
            if not isinstance(holder.get(name), dict):
                holder[name] = {}
            holder = holder[name]
        if not isinstance(value, Mapping) or not isinstance(holder.get(key), dict):
            holder[key] = thaw(value)
            self._forget_inside(assignment.path)
        self._record(assignment)

    def _record(self, assignment: Assignment) -> None:
        self._origins.setdefault(dotted(assignment.path), []).append(assignment.origin)

    def _forget_inside(self, path: Path) -> None:
        """What was written inside a table that is now replaced is gone."""
        inside = dotted(path) + "."
        for known in [known for known in self._origins if known.startswith(inside)]:
            del self._origins[known]

    def _refuse_unknown(self, table: _Table, depth: int, path: Path) -> None:
        sentence, meant = suggestion(self._root.cls, table.cls, path, depth)
        self.broken.update(meant)
        if len(meant) == 1:
            raise _refusal(f"no such field; {sentence}")
        raise _refusal(f"no such field of {table.cls.__name__}", hint=sentence)

    def _build(self, table: _Table, path: Path) -> Any:
        changes = {
            name: self._build(change, (*path, name)) if isinstance(change, _Table) else change
            for name, change in table.changes.items()
        }
        try:
            return attrs.evolve(table.base, **changes) if changes else table.base
        except (TypeError, ValueError) as error:  # a class may judge several of its fields together
            self.broken.add(dotted(path))
            for problem in _problems(error):
                whole = ".".join(filter(None, (dotted(path), problem.path)))
                self.problems.append(attrs.evolve(problem, path=whole, place=place_of(whole, self.origins)))
            return table.base


def structure(value: Any, cls: type[T]) -> T:
    """A complete or partial mapping as an instance of `cls`, patched onto its defaults: what `cattrs.structure` calls.

    Raises `ConfigError` with every problem.
    """
    draft = Draft(cls())
    draft.assign(Assignment(path=(), value=value, origin=Origin(kind="python")))
    built = draft.build()
    if draft.problems:
        raise ConfigError(draft.problems, title=f"{cls.__name__} cannot be built")
    return built


class _Table:
    """One nested instance: the class that its place asks for, what it was, and what changed."""

    def __init__(self, declared: type[Any], base: Any) -> None:
        self.declared = declared
        self.base = base
        self.changes: dict[str, Any] = {}

    @property
    def cls(self) -> type[Any]:
        return type(self.base)

    def current(self, name: str) -> Any:
        return self.changes[name] if name in self.changes else getattr(self.base, name)

    def child(self, name: str, declared: type[Any]) -> _Table:
        """The nested table `name`, made from its current value, or from its class's defaults where that is None."""
        value = self.current(name)
        if not isinstance(value, _Table):
            value = self.changes[name] = _Table(declared, declared() if value is None else value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """The free-form table `name`, to be changed; empty where it was None."""
        value = self.current(name)
        made: dict[str, Any] = value if isinstance(value, dict) else thaw(value or {})
        self.changes[name] = made
        return made

    def become(self, name: Any) -> None:
        """Take another, already imported, class: the `class` key of a stored tree. What differs from defaults stays."""
        cls = known_class(name) if isinstance(name, str) else None
        if cls is None or not issubclass(cls, self.declared):
            raise _refusal(f"{shown(name)} is not an imported subclass of {class_name(self.declared)}")
        common = fields_of(cls).keys() & fields_of(self.cls).keys()
        default = self.cls()
        kept = {key: getattr(self.base, key) for key in common if getattr(self.base, key) != getattr(default, key)}
        self.base = cls(**kept)
        self.changes = {key: change for key, change in self.changes.items() if key in common}


def _read(assignment: Assignment, kind: Any) -> Any:
    return parse(assignment.value, kind) if assignment.is_text else fit(assignment.value, kind)


def _accepted(attribute: Any, value: Any, owner: Any) -> Any:
    """The value, once the field's converter and validators have taken it. Raises ValueError."""
    try:
        value = fit_field(attribute, value)
        if attribute.validator is not None:
            attribute.validator(owner, attribute, value)
    except TypeError as error:  # so attrs' own validators refuse a type
        raise ConfigError(_problems(error)) from None
    return value


def _problems(error: Exception) -> tuple[Problem, ...]:
    """Our own, or what an exception of somebody else's validator says."""
    if isinstance(error, ConfigError):
        return error.problems
    message = str(error.args[0]) if error.args else type(error).__name__
    return (Problem(path="", message=message, hint=getattr(error, "hint", "")),)


def _refusal(message: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem(path="", message=message, hint=hint)])


def _written_in(value: Any, path: Path, default: Any = None) -> Iterator[Path]:
    """Paths below `path` of the leaves that an instance does not have from its class."""
    if not attrs.has(type(value)):
        return
    if type(default) is not type(value):
        default = type(value)()
    for name in fields_of(type(value)):
        ours, theirs = getattr(value, name), getattr(default, name)
        if attrs.has(type(ours)):
            yield from _written_in(ours, (*path, name), theirs)
        elif ours != theirs:
            yield (*path, name)
