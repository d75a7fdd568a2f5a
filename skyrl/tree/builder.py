"""Builds a tree by patching the default instance: assignments are applied one by one; the result is a new frozen tree.

The default *instance*, not the default class: `critic.optimizer_config.weight_decay=0.2` must leave lr at the 5e-6 that
the critic's default instance has. All problems are collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import attrs
from attrs import evolve, frozen

from skyrl.errors import ConfigError, Problem
from skyrl.tree import freeform
from skyrl.tree.classes import (
    assembled,
    class_name,
    docs_of,
    fields_of,
    is_config,
    known_class,
    mark_written,
    named_tables_of,
    table_class,
    validated,
)
from skyrl.tree.files import Presets, read_file
from skyrl.tree.freeform import refusal
from skyrl.tree.frozen import thaw
from skyrl.tree.masking import REFERENCE
from skyrl.tree.migrations import Migration, follow
from skyrl.tree.origins import DEFAULT, Assignment, Origin, Origins, Path, cut_short, dotted, place_of
from skyrl.tree.suggestions import Elsewhere, no_other_system, suggestion
from skyrl.tree.types import (
    MOST_VALUES,
    NULL_WORDS,
    TypeMismatch,
    class_of,
    coerce_exact,
    config_class,
    count_values,
    describe,
    display_value,
    fit,
    holds_secret,
    is_bracketed,
    is_mapping,
    is_optional,
    item_kind,
    list_arm,
    parse,
    value_kind,
)


class MissingVariable(ConfigError):
    """An environment variable that is not set. It is an error only if no later layer sets the value."""


@frozen(kw_only=True)
class ReadContext:
    """Everything that a user's own files and arguments may refer to; stored trees may refer to nothing."""

    environ: Mapping[str, str] | None = None
    """Variables that `env:NAME` may name. None: no environment was given."""

    presets: Presets = MappingProxyType({})
    """Tables that `table=@preset:NAME` may name."""

    migrations: tuple[Migration, ...] = ()
    """Older names of paths."""

    elsewhere: Elsewhere = no_other_system
    """What other systems call our fields, for suggestions."""

    is_open: bool = False
    """Whether references (`env:NAME`, `@file`, `class = "module:Name"` of a module not imported yet) are followed."""

    remembers: bool = False
    """Whether each table of the tree says which of its fields were written (`classes.written_fields`)."""

    def follows(self, origin: Origin | None) -> bool:
        """May references from this place be followed: a variable, a file, a class to import?"""
        return self.is_open and not (origin is not None and origin.is_stored)

    def filled(self, assignment: Assignment, kind: object) -> Assignment:
        """The assignment with `env:NAME` replaced by the variable's text, read as on a command line. A secret stays a
        reference.

        Raises `MissingVariable` if the variable is not set.
        """
        value = assignment.value
        match = REFERENCE.fullmatch(value) if isinstance(value, str) and self.follows(assignment.origin) else None
        if not match or holds_secret(kind):
            return assignment
        if self.environ is None:
            message = f"{value} needs environment variables, but none were passed"
            raise MissingVariable([Problem(path="", message=message, hint="pass them: load(..., environ=os.environ)")])
        if match[1] not in self.environ:
            message, hint = f"{value}: this environment variable is not set", f"export {match[1]}=..."
            raise MissingVariable([Problem(path="", message=message, hint=hint)])
        origin = Origin(kind="environment", where=match[1], requested_by=assignment.origin)
        return evolve(assignment, value=self.environ[match[1]], origin=origin, is_text=True)


NOTHING = ReadContext()
"""Context for stored trees, which are pure data."""


class Table:
    """A nested table under construction: its declared class, the instance it starts from, and the changes."""

    def __init__(self, declared: type[Any], base: object) -> None:
        self.declared = declared
        self.base = base
        self.changes: dict[str, Any] = {}
        self.is_forgotten = False
        """Whether a value inside was forgotten; distinguishes such a table from one written empty, which is kept."""
        self.was_absent = False
        """Whether the table did not exist before something was written in it."""
        self.unread = ""
        """Import path of its class, if that is not followed; see `imports.following`."""

    @property
    def cls(self) -> type[Any]:
        """The class of the instance under construction."""
        return type(self.base)

    def current(self, name: str) -> Any:
        """The value of a field, changed or not."""
        return self.changes[name] if name in self.changes else getattr(self.base, name)

    def child(self, name: str, declared: type[Any]) -> Table:
        """The nested table `name`, created from its current value, or from its class's defaults if that is None."""
        value = self.current(name)
        if not isinstance(value, Table):
            was_absent = value is None
            value = self.changes[name] = Table(declared, declared() if was_absent else value)
            value.was_absent = was_absent
        return value

    def drop_if_untouched(self, name: str) -> None:
        """Reset a table whose default is None to None if everything written in it has been forgotten."""
        child = self.changes.get(name)
        if isinstance(child, Table) and child.is_forgotten and not child.changes and getattr(self.base, name) is None:
            del self.changes[name]

    def mapping(self, name: str) -> dict[str, Any]:
        """The free-form table `name` in mutable form; empty if it was None."""
        value = self.current(name)
        table: dict[str, Any] = value if isinstance(value, dict) else thaw(value or {})
        self.changes[name] = table
        return table

    def become(self, name: object, *, may_import: bool) -> None:
        """Change to the class with this import path, the value of the key `class`. Values that differ from the defaults
        are kept.

        A module that is not imported yet is imported only if a user's own file or argument names it.
        """
        cls = known_class(name) if isinstance(name, str) else None
        if cls is None and isinstance(name, str) and may_import:
            from skyrl.tree.imports import follows, import_class  # few files name a class that is not imported yet

            if not follows("classes") and ":" in name:
                self.unread = name
                return
            cls = import_class(name)
        if cls is None or not issubclass(cls, self.declared):
            kind = "a subclass" if may_import else "an imported subclass"
            message = f"{display_value(name)} is not {kind} of {class_name(self.declared)}"
            hint = "write module:Name or file.py:Name of a class decorated with @frozen" if may_import else ""
            raise ConfigError([Problem(path="", message=message, hint=hint)])
        self.changes = {key: change for key, change in self.changes.items() if key in fields_of(cls)}
        self.base = with_class(self.base, cls)


def with_class(table: object, cls: type[Any]) -> object:
    """An instance of another class in place of a table, with the values in which the table differs from its class's
    defaults.
    """
    default = type(table)()
    common = fields_of(cls).keys() & fields_of(type(table)).keys()
    return cls(**{key: getattr(table, key) for key in common if getattr(table, key) != getattr(default, key)})


T = TypeVar("T")

MOST_SUGGESTIONS = 100
"""Largest number of unknown names in one tree for which a similar name is searched."""

MOST_PROBLEMS = 1_000
"""Largest number of problems listed for one tree."""

MOST_COPIED = 1_000_000
"""Largest number of list items copied because one item of a list changes: about 1,400 `+=` on one list."""

MOST_NAMES = 80
"""Largest number of names in a path: the levels of the tree's tables and of a free-form value together."""

MOST_LETTERS = 1000
"""Largest number of characters in one name of a path."""

TOO_MANY_VALUES = f"a configuration may have at most {MOST_VALUES} values in total"


class TreeBuilder(Generic[T]):
    """A tree under construction. `build()` returns the frozen result; `problems` and `origins` record what happened.

    A value that does not fit leaves the field unchanged, so that the rest can still be checked; `broken` names the
    field, or the fields that a misspelled name may have meant. `context` says what may be read besides the values.
    """

    def __init__(self, base: T, context: ReadContext = NOTHING) -> None:
        self._root = Table(type(base), base)
        self._context = context
        self._kept: dict[Path, list[Assignment]] = {}
        """Assignments to tables of `ClassOf`, whose class is known only at the end."""
        self._history = History()
        self._unfilled: list[tuple[Assignment, MissingVariable, Origin | None]] = []
        self._unknown = 0
        self._values = 0
        self._copied = 0
        self.problems: list[Problem] = []
        self.broken: set[str] = set()

    @property
    def origins(self) -> Origins:
        """Dotted path -> its origins, winner last."""
        return self._history.origins

    @property
    def written(self) -> list[str]:
        """Dotted path of every value that was written, in order."""
        return self._history.written

    def assign_all(self, assignments: Iterable[Assignment]) -> None:
        """Assign in order; a later assignment to the same path wins. Raises `ConfigError` beyond `MOST_VALUES`."""
        for assignment in assignments:
            self.assign(assignment)

    def assign(self, assignment: Assignment) -> None:
        """Apply one assignment, or record the problem that prevents it.

        Raises `ConfigError` beyond `MOST_VALUES` of this tree.
        """
        self._values += count_values(assignment.value, MOST_VALUES)
        if self._values > MOST_VALUES:
            path, location = dotted(assignment.path), assignment.origin.location
            problem = Problem(path=path, message=TOO_MANY_VALUES, location=location)
            raise ConfigError([problem], title="This configuration cannot be used")
        if is_empty_file(assignment):
            path, file = dotted(assignment.path), assignment.origin.where
            message, hint = f"{file} is empty and sets nothing", "write settings into it, or leave it out"
            self.problems.append(Problem(path=path, message=message, hint=hint, severity="warning"))
        self._put(assignment)

    def _put(self, assignment: Assignment) -> None:
        if len(self.problems) > MOST_PROBLEMS:
            return
        if len(self.problems) == MOST_PROBLEMS:
            message = f"stopped after {MOST_PROBLEMS} problems; the rest was not checked"
            self.problems.append(Problem(path="", message=message))
            return
        path = assignment.path
        try:
            if len(path) > MOST_NAMES:  # the time that a path takes grows with the square of its length
                raise refusal(f"this path has {len(path)} names; the limit is {MOST_NAMES}")
            if path and len(path[-1]) > MOST_LETTERS:  # the names before it were checked with the tables they name
                raise refusal(f"this name has {len(path[-1])} characters; the limit is {MOST_LETTERS}")
            self._assign(self._root, 0, assignment)
        except MissingVariable as error:
            self._unfilled.append((assignment, error, self._history.winner(assignment.path)))
        except ValueError as error:
            self._refuse(assignment, error)

    def build(self) -> T:
        """The patched tree. A table whose class rejects its values in combination keeps its previous value."""
        for assignment, error, before in self._unfilled:
            if self._history.winner(assignment.path) is before:
                self._refuse(assignment, error)
        self._unfilled.clear()
        self.problems += self._history.contradictions()
        return cast(T, self._build(self._root, ()))

    def _refuse(self, assignment: Assignment, error: ValueError) -> None:
        path, location = cut_short(dotted(assignment.path)), assignment.origin.location
        self.broken.add(path)
        self.problems += (evolve(problem, path=path, location=location) for problem in problems_of(error))

    def _assign(self, table: Table, depth: int, assignment: Assignment) -> None:
        """Descend to the table or field that the path names; its first `depth` names led to `table`."""
        path = assignment.path
        if depth == len(path):
            self._merge(table, assignment)
            return
        name, last = path[depth], depth + 1 == len(path)
        attribute = fields_of(table.cls).get(name)
        if attribute is None and name == "class" and last and assignment.operation == "set":
            table.become(assignment.value, may_import=self._context.follows(assignment.origin))
            if table.unread:
                message = f"not checked: {display_value(table.unread)} is not imported, so its fields are unknown"
                location = assignment.origin.location
                self.problems.append(Problem(path=dotted(path), message=message, location=location, severity="warning"))
        elif attribute is None and table.unread:
            pass  # a field of the class that is not imported, or a mistake
        elif attribute is None:
            self._other_name(table, depth, assignment)
        elif last and assignment.operation == "forget":
            self._forget(table, attribute, assignment)
        elif last and self._is_subtree(attribute, assignment):
            self._graft(assignment)
        elif nested := class_of_table(attribute, table.current(name)):
            if not (last and self._replace(table, attribute, nested, assignment)):
                self._assign(table.child(name, nested), depth + 1, assignment)
                table.drop_if_untouched(name)
        elif last:
            self._set(table, attribute, assignment)
        elif is_mapping(attribute.type):
            self._set_inside(table, attribute, depth, assignment)
        elif depth + 2 == len(path) and list_arm(attribute.type) and assignment.operation == "set":
            self._set_item(table, attribute, assignment)
        else:
            owner = dotted(path[: depth + 1])
            raise refusal(f"no such field: {owner} is {describe(attribute.type)}", code="no table")

    def _merge(self, table: Table, assignment: Assignment) -> None:
        """Merge a mapping into a table key by key, each with its own origin; `class` comes first."""
        if assignment.operation == "append":
            raise refusal("is a table; += works only on lists")
        value, named_by = assignment.value, getattr(table.cls, "named_by", "")
        if named_by and isinstance(value, str) and value and value.isprintable() and not is_bracketed(value):
            # Text in place of a table was probably meant for the field that selects the table's kind.
            meant = dotted((*assignment.path, named_by))
            raise refusal(f"{display_value(value)} is not {describe(table.cls)}", hint=f"did you mean {meant}={value}?")
        value = parse(value, table.cls) if assignment.is_text else value
        if not isinstance(value, Mapping):
            raise refusal(f"{display_value(value)} is not {describe(table.cls)}")
        if not value and table.was_absent:
            self._history.add(assignment.path, assignment.origin, {})
        for key in sorted(value, key=lambda key: key != "class"):
            self._put(assignment.inside(str(key), value[key]))

    def _replace(
        self, table: Table, attribute: attrs.Attribute[Any], nested: type[Any], assignment: Assignment
    ) -> bool:
        """Replace a whole table by null or by an instance. Returns False for any other value."""
        value = assignment.value
        null = value is None or (isinstance(value, str) and value in (NULL_WORDS if assignment.is_text else ("none",)))
        if null and is_optional(attribute.type):
            value = table.changes[attribute.name] = None
        elif isinstance(value, nested):
            instance = coerce_exact(value, nested)
            is_whole = self._context.remembers and is_optional(attribute.type)
            table.changes[attribute.name] = mark_written(instance, fields_of(type(instance))) if is_whole else instance
        else:
            return False
        self._history.forget_inside(assignment.path)
        self._history.add(assignment.path, assignment.origin, value)
        for path, inner in written_in(value, assignment.path):
            self._history.begin(path, assignment.origin, inner)
        return True

    def _is_subtree(self, attribute: attrs.Attribute[Any], assignment: Assignment) -> bool:
        """Whether the assignment is `table=@file`. Text fields take a value that begins with @ literally."""
        return (
            assignment.is_text
            and assignment.value.startswith("@")
            and (config_class(attribute.type) is not None or is_mapping(attribute.type))
            and self._context.follows(assignment.origin)
        )

    def _graft(self, assignment: Assignment) -> None:
        """Insert the tree of a file at the path. Problems of the file are reported at their place in the file."""
        try:
            assignments = read_file(assignment.value[1:], self._context.presets)
        except ConfigError as error:
            self.broken.add(dotted(assignment.path))
            self.problems += [
                evolve(problem, location=problem.location or assignment.origin.location) for problem in error.problems
            ]
            return
        self.assign_all(result.below(assignment.path) for result in assignments)

    def _forget(self, table: Table, attribute: attrs.Attribute[Any], assignment: Assignment) -> None:
        """Reset a field to the default instance's value, discarding what earlier layers wrote."""
        table.changes.pop(attribute.name, None)
        table.is_forgotten = True
        self._kept.pop(assignment.path, None)
        self._history.forget_inside(assignment.path)
        back = Origin(kind="default", where=assignment.origin.location)
        self._history.begin(assignment.path, back, getattr(table.base, attribute.name))

    def _set(self, table: Table, attribute: attrs.Attribute[Any], assignment: Assignment) -> None:
        original, assignment = assignment, self._context.filled(assignment, attribute.type)
        if assignment.operation == "append":  # a variable gives a part of the list
            value: Any = appended(attribute, table.current(attribute.name), assignment)
            assignment = evolve(assignment, origin=original.origin)
            self._count_copied(value)
        elif assignment.is_text or is_mapping(attribute.type):
            value = fit(assignment.value, attribute.type, is_text=assignment.is_text)
        else:
            value = assignment.value
        merges = is_mapping(attribute.type) and table.current(attribute.name) is not None
        if isinstance(value, Mapping) and (value or merges):
            for key, item in value.items():
                self._put(assignment.inside(str(key), item))
        else:
            stored = table.changes[attribute.name] = validated(attribute, value, table.base)
            if is_mapping(attribute.type):
                self._history.forget_inside(assignment.path)
            self._history.add(assignment.path, assignment.origin, stored)

    def _set_item(self, table: Table, attribute: attrs.Attribute[Any], assignment: Assignment) -> None:
        """Replace an existing list item: `list.0 = value`."""
        items = list(table.current(attribute.name)) if isinstance(table.current(attribute.name), tuple) else []
        index = freeform.position(assignment.path[-1], items)
        self._count_copied(items)
        items[index] = fit(assignment.value, item_kind(list_arm(attribute.type)), is_text=assignment.is_text)
        stored = table.changes[attribute.name] = validated(attribute, items, table.base)
        self._history.add(assignment.path[:-1], assignment.origin, stored)

    def _count_copied(self, items: Sequence[object]) -> None:
        """Bound the cost of item-by-item changes: each copies the whole list, so the total is quadratic."""
        self._copied += len(items)
        if self._copied > MOST_COPIED:
            raise refusal("too many changes to single list items", hint="write the whole list as one value")

    def _set_inside(self, table: Table, attribute: attrs.Attribute[Any], depth: int, assignment: Assignment) -> None:
        """Set a key inside a free-form table: `dict_field.a.b = value`."""
        mapping, inner = table.mapping(attribute.name), assignment.path[depth + 1 :]
        if assignment.operation == "forget":
            freeform.forget(mapping, inner, getattr(table.base, attribute.name))
            self._keep(attribute, depth, assignment)
            if (outer := freeform.outermost(mapping, inner)) == inner:
                self._history.forget(assignment.path)
            else:
                entry = freeform.enter(mapping, outer)[outer[-1]]
                self._history.add((*assignment.path[: depth + 1], *outer), assignment.origin, entry)
            return
        original = assignment
        if not class_of(attribute.type):  # a class that is known only at the end reads its own references
            assignment = self._context.filled(assignment, value_kind(attribute.type))
        kind = value_kind(attribute.type) if len(inner) == 1 else Any
        value = fit(assignment.value, kind, is_text=assignment.is_text)
        if isinstance(value, Mapping) and value:
            freeform.make_way(mapping, inner)
            for key, item in value.items():
                self._put(assignment.inside(str(key), item))
            return
        holder, key = freeform.enter(mapping, inner), inner[-1]
        written = (*assignment.path[: depth + 1], *freeform.outermost(mapping, inner))
        if assignment.operation == "append":
            freeform.append(holder, key, value)
        elif isinstance(holder, list):
            holder[freeform.position(key, holder)] = thaw(value)
        elif not isinstance(value, Mapping) or not isinstance(holder.get(key), dict):
            holder[key] = thaw(value)
            self._history.forget_inside(assignment.path)
        is_whole = written == assignment.path and assignment.operation == "set"
        self._history.add(written, assignment.origin if is_whole else original.origin, value)
        self._keep(attribute, depth, original)

    def _keep(self, attribute: attrs.Attribute[Any], depth: int, assignment: Assignment) -> None:
        """Keep an assignment to a table of `ClassOf`, to be read again by the class once that is known."""
        if class_of(attribute.type):
            field_path, inside = assignment.path[: depth + 1], assignment.path[depth + 1 :]
            self._kept.setdefault(field_path, []).append(evolve(assignment, path=inside))

    def _other_name(self, table: Table, depth: int, assignment: Assignment) -> None:
        """An old name is followed with a warning; any other unknown one is refused."""
        if followed := follow(self._context.migrations, assignment):
            assignments, warnings = followed
            self.assign_all(assignments)
            self.problems += warnings
            return
        self._unknown += 1
        if self._unknown > MOST_SUGGESTIONS:  # probably another program's file: searching for every name is wasteful
            raise refusal(f"no such field of {table.cls.__name__}", code="unknown field")
        sentence, meant = suggestion(self._root.cls, table.cls, assignment.path, depth, self._context.elsewhere)
        self.broken.update(meant)
        if len(meant) == 1:
            raise refusal(f"no such field; {sentence}", code="misspelled field")
        raise refusal(f"no such field of {table.cls.__name__}", hint=sentence, code="unknown field")

    def _build(self, table: Table, path: Path) -> Any:
        """The instance of a table and of those inside it. A table of `ClassOf` becomes an instance of the class that
        another field names, which is known only now.
        """
        changes = {
            name: self._build(change, (*path, name)) if isinstance(change, Table) else change
            for name, change in table.changes.items()
        }
        try:
            built = with_changes(table.base, changes) if changes else table.base
            if self._context.remembers and (changes or table.was_absent or not path):
                leaves = (name for name, change in table.changes.items() if not isinstance(change, Table))
                built = mark_written(built, leaves)
            for name, naming in named_tables_of(type(built)).items() if changes else ():
                if isinstance(getattr(built, name), Mapping):
                    named_by = self._history.winner((*path, naming.field))
                    cls = naming.find(getattr(built, naming.field), self._context.follows(named_by))
                    if cls is not None:
                        instance = self._instance(cls, (*path, name), getattr(table.base, name))
                        built = with_changes(built, {name: instance})
            return built
        except (TypeError, ValueError) as error:  # a class may validate several of its fields together
            self.broken.add(dotted(path))
            for problem in problems_of(error):
                full_path = ".".join(filter(None, (dotted(path), problem.path)))
                self.problems.append(evolve(problem, path=full_path, location=place_of(full_path, self.origins)))
            return table.base

    def _instance(self, cls: type[Any], path: Path, default: object) -> Any:
        """An instance of `cls` from the table's default and what was written into it."""
        inner = TreeBuilder(cls(), self._context)
        if isinstance(default, Mapping) and default:
            inner.assign(Assignment(path=(), value=default, origin=DEFAULT))
        inner.assign_all(self._kept.get(path, ()))
        instance, prefix = inner.build(), dotted(path) + "."
        for problem in inner.problems:
            hint = problem.hint or docs_of(cls).get(problem.path, "")
            self.problems.append(evolve(problem, path=prefix + problem.path, hint=hint))
        self.broken.update(prefix + item for item in inner.broken)
        self._history.take_over(inner.origins, path)
        return instance


def is_empty_file(assignment: Assignment) -> bool:
    """Whether this is the whole content of a file that has no entry, such as one of comments alone."""
    return assignment.origin.kind == "file" and not assignment.origin.path and assignment.value == {}


def structure(value: object, cls: type[T]) -> T:
    """A complete or partial mapping as an instance of `cls`, patched onto its defaults: what `cattrs.structure` calls.

    Raises `ConfigError` with every problem.
    """
    builder = TreeBuilder(cls(), ReadContext(remembers=True))
    builder.assign(Assignment(path=(), value=value, origin=Origin(kind="python")))
    built = builder.build()
    if builder.problems:
        raise ConfigError(builder.problems, title=f"{cls.__name__} cannot be built")
    return built


def with_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """A copy with these values, which were validated when assigned. Free-form tables, which may have changed since, and
    classes that validate their fields together are validated now. Raises ValueError.
    """
    cls = type(config)
    if hasattr(cls, "__attrs_post_init__") or not is_config(cls):
        return evolve(config, **changes)
    fields, judged_now, problems = fields_of(cls), {}, []
    for name in [name for name, value in changes.items() if type(value) is dict]:
        try:
            judged_now[name] = validated(fields[name], changes[name], config)
        except ValueError as error:
            problems += [evolve(item, path=item.path or name) for item in problems_of(error)]
    if problems:
        raise ConfigError(problems)
    return assembled(config, {**changes, **judged_now})


def class_of_table(attribute: attrs.Attribute[Any], value: object) -> type[Any] | None:
    """Class of a nested table, finished or under construction; None for a leaf."""
    return value.declared if isinstance(value, Table) else table_class(attribute, value)


def appended(attribute: attrs.Attribute[Any], current: object, assignment: Assignment) -> tuple[Any, ...]:
    """The current list with one more item, or with the items of another list."""
    kind = list_arm(attribute.type)
    if kind is None:
        raise refusal(f"+= works only on lists; this is {describe(attribute.type)}")
    before = () if current is None else current if isinstance(current, tuple) else (current,)
    text = assignment.value
    return (*before, *parse(text, kind)) if is_bracketed(text) else (*before, parse(text, item_kind(kind)))


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """Problems of a `ConfigError`; for any other exception of a validator, one problem with its message."""
    if isinstance(error, ConfigError):
        return error.problems
    message = str(error.args[0]) if error.args else type(error).__name__
    hint = getattr(error, "hint", "")
    if isinstance(error, TypeMismatch):
        return (Problem(path="", message=message, hint=hint, code=error.code, value=error.value),)
    return (Problem(path="", message=message, hint=hint),)


def written_in(value: object, path: Path, default: object = None) -> Iterator[tuple[Path, Any]]:
    """Paths below `path`, with their values, of the leaves in which an instance differs from its class's defaults."""
    if not attrs.has(type(value)):
        return
    if type(default) is not type(value):
        default = type(value)()
    for name in fields_of(type(value)):
        field_value, default_value = getattr(value, name), getattr(default, name)
        if attrs.has(type(field_value)):
            yield from written_in(field_value, (*path, name), default_value)
        elif field_value != default_value:
            yield (*path, name), field_value


class History:
    """Dotted path -> its origins, winner last."""

    def __init__(self) -> None:
        self._chains: dict[str, list[Origin]] = {}
        self.written: list[str] = []
        """Dotted path of every value that was written, in order, including values replaced or forgotten since."""
        self._around: set[Path] = set()
        """Tables in which something was written, even if it was forgotten since."""

    @property
    def origins(self) -> Origins:
        """Current origins of every path."""
        return {path: tuple(chain) for path, chain in self._chains.items()}

    def winner(self, path: Path) -> Origin | None:
        """Origin of the current value; None if nothing was written."""
        return self._chains.get(dotted(path), [None])[-1]

    def add(self, path: Path, origin: Origin, value: object) -> None:
        """Record `origin` as the source of this value; it takes precedence over earlier ones."""
        self._chains.setdefault(dotted(path), []).append(origin.giving(value))
        self.written.append(dotted(path))
        self._note(path)

    def begin(self, path: Path, origin: Origin, value: object) -> None:
        """Record `origin` as the only source of this value, forgetting earlier ones."""
        self._chains.pop(dotted(path), None)
        self.add(path, origin, value)

    def _note(self, path: Path) -> None:
        while (path := path[:-1]) and path not in self._around:
            self._around.add(path)

    def forget(self, path: Path) -> None:
        """Forget everything written at the path or inside it."""
        self._chains.pop(dotted(path), None)
        self.forget_inside(path)

    def forget_inside(self, path: Path) -> None:
        """Forget everything written inside a table that is now replaced."""
        if path not in self._around:
            return
        inside = dotted(path) + "."
        for known in [known for known in self._chains if known.startswith(inside)]:
            del self._chains[known]

    def take_over(self, origins: Origins, prefix: Path) -> None:
        """Adopt the origins of a separately built tree that is now the subtree at `prefix`."""
        self._note((*prefix, ""))
        self._chains.update({f"{dotted(prefix)}.{path}": list(chain) for path, chain in origins.items()})
        self.written += (f"{dotted(prefix)}.{path}" for path in origins)

    def contradictions(self) -> Iterator[Problem]:
        """Problems where one layer sets a field to two values under two of its names: a file, whose keys have no order,
        or the arguments.
        """
        for path, chain in self._chains.items():
            layers = [(item.requested_by or item, item.value) for item in chain] if len(chain) > 1 else []
            inside = f"{path}."  # an item of the list at this path, which is no other name of it
            by_name = {
                (layer.source, layer.path): (layer, value)
                for layer, value in layers
                if layer.path and not dotted(layer.path).startswith(inside)
            }
            for one, other in combinations(by_name.values(), 2):
                if one[0].source == other[0].source and one[0].path != other[0].path and one[1] != other[1]:
                    (old, former), (new, latter) = (one, other) if dotted(other[0].path) == path else (other, one)
                    both = f"{display_value(former)} contradicts {dotted(new.path)} = {display_value(latter)}"
                    message = f"{both}: both names are the same field"
                    hint = f"keep only {path}"
                    yield Problem(path=dotted(old.path), message=message, hint=hint, location=old.location)
