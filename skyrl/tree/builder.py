"""Builds a tree by patching the default instance: assignments are applied one by one; the result is a new frozen tree.

The default *instance*, not the default class: `critic.optimizer_config.weight_decay=0.2` must leave lr at the 5e-6 that
the critic's default instance has. All problems are collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree import freeform
from skyrl.tree.classes import fields_of, named_tables_of, validated, with_written
from skyrl.tree.freeform import refusal
from skyrl.tree.frozen import thaw
from skyrl.tree.history import History
from skyrl.tree.literals import NULL_WORDS, is_bracketed
from skyrl.tree.migrations import follow
from skyrl.tree.origins import DEFAULT, Assignment, Origin, Origins, Path, check_length, cut_short, dotted, place_of
from skyrl.tree.patches import appended, class_of_table, problems_of, read, with_changes, written_in
from skyrl.tree.plain import MOST_VALUES, count_values, shown
from skyrl.tree.read_context import NOTHING, MissingVariable, ReadContext
from skyrl.tree.suggestions import suggestion
from skyrl.tree.table import Table
from skyrl.tree.types import (
    class_of,
    coerce_exact,
    config_class,
    describe,
    is_mapping,
    is_optional,
    item_kind,
    list_arm,
    parse,
    value_kind,
)

T = TypeVar("T")

MOST_SUGGESTIONS = 100
"""Largest number of unknown names in one tree for which a similar name is searched."""

MOST_PROBLEMS = 1_000
"""Largest number of problems listed for one tree."""

MOST_COPIED = 1_000_000
"""Largest number of list items copied because one item of a list changes: about 1,400 `+=` on one list."""

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
            problem = Problem(path=dotted(assignment.path), message=TOO_MANY_VALUES, place=assignment.origin.place)
            raise ConfigError([problem], title="This configuration cannot be used")
        self._put(assignment)

    def _put(self, assignment: Assignment) -> None:
        if len(self.problems) > MOST_PROBLEMS:
            return
        if len(self.problems) == MOST_PROBLEMS:
            self.problems.append(
                Problem(path="", message=f"stopped after {MOST_PROBLEMS} problems; the rest was not checked")
            )
            return
        try:
            check_length(assignment.path)
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
        path = cut_short(dotted(assignment.path))
        self.broken.add(path)
        for problem in problems_of(error):
            self.problems.append(attrs.evolve(problem, path=path, place=assignment.origin.place))

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
                message = f"not checked: {shown(table.unread)} is not imported, so its fields are unknown"
                place = assignment.origin.place
                self.problems.append(Problem(path=dotted(path), message=message, place=place, severity="warning"))
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
        self._refuse_name(table, assignment)
        value = parse(assignment.value, table.cls) if assignment.is_text else assignment.value
        if not isinstance(value, Mapping):
            raise refusal(f"{shown(value)} is not {describe(table.cls)}")
        if not value and table.was_absent:
            self._history.add(assignment.path, assignment.origin, {})
        for key in sorted(value, key=lambda key: key != "class"):
            self._put(assignment.inside(str(key), value[key]))

    def _refuse_name(self, table: Table, assignment: Assignment) -> None:
        """Refuse text in place of a table: it was probably meant for the field that selects the table's kind."""
        name, value = getattr(table.cls, "named_by", ""), assignment.value
        if name and isinstance(value, str) and value and value.isprintable() and not is_bracketed(value):
            meant = dotted((*assignment.path, name))
            raise refusal(f"{shown(value)} is not {describe(table.cls)}", hint=f"did you mean {meant}={value}?")

    def _replace(
        self, table: Table, attribute: attrs.Attribute[Any], nested: type[Any], assignment: Assignment
    ) -> bool:
        """Replace a whole table by null or by an instance. Returns False for any other value."""
        value = assignment.value
        null = value is None or (isinstance(value, str) and value in (NULL_WORDS if assignment.is_text else ("none",)))
        if null and is_optional(attribute.type):
            value = table.changes[attribute.name] = None
        elif isinstance(value, nested):
            given = coerce_exact(value, nested)
            is_whole = self._context.remembers and is_optional(attribute.type)
            table.changes[attribute.name] = with_written(given, fields_of(type(given))) if is_whole else given
        else:
            return False
        self._history.forget_inside(assignment.path)
        self._history.add(assignment.path, assignment.origin, value)
        for path, inner in written_in(value, assignment.path):
            self._history.begin(path, assignment.origin, inner)
        return True

    def _is_subtree(self, attribute: attrs.Attribute[Any], assignment: Assignment) -> bool:
        """Whether the assignment is `table=@file`. Text fields take a value that begins with @ literally."""
        is_table = config_class(attribute.type) is not None or is_mapping(attribute.type)
        return (
            assignment.is_text
            and is_table
            and assignment.value.startswith("@")
            and self._context.follows(assignment.origin)
        )

    def _graft(self, assignment: Assignment) -> None:
        """Insert the tree of a file at the path. Problems of the file are reported at their place in the file."""
        from skyrl.tree.files import read_file  # few command lines have one

        try:
            found = read_file(assignment.value[1:], self._context)
        except ConfigError as error:
            self.broken.add(dotted(assignment.path))
            self.problems += [
                attrs.evolve(each, place=each.place or assignment.origin.place) for each in error.problems
            ]
            return
        self.assign_all(each.below(assignment.path) for each in found)

    def _forget(self, table: Table, attribute: attrs.Attribute[Any], assignment: Assignment) -> None:
        """Reset a field to the default instance's value, discarding what earlier layers wrote."""
        table.changes.pop(attribute.name, None)
        table.is_forgotten = True
        self._kept.pop(assignment.path, None)
        self._history.forget_inside(assignment.path)
        back = Origin(kind="default", where=assignment.origin.place)
        self._history.begin(assignment.path, back, getattr(table.base, attribute.name))

    def _set(self, table: Table, attribute: attrs.Attribute[Any], assignment: Assignment) -> None:
        asked, assignment = assignment, self._context.filled(assignment, attribute.type)
        if assignment.operation == "append":  # a variable gives a part of the list
            value: Any = appended(attribute, table.current(attribute.name), assignment)
            assignment = attrs.evolve(assignment, origin=asked.origin)
            self._count_copied(value)
        elif assignment.is_text or is_mapping(attribute.type):
            value = read(assignment, attribute.type)
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
        items[index] = read(assignment, item_kind(list_arm(attribute.type)))
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
                whole = freeform.enter(mapping, outer)[outer[-1]]
                self._history.add((*assignment.path[: depth + 1], *outer), assignment.origin, whole)
            return
        asked = assignment
        if not class_of(attribute.type):  # a class that is known only at the end reads its own references
            assignment = self._context.filled(assignment, value_kind(attribute.type))
        value = read(assignment, value_kind(attribute.type) if len(inner) == 1 else Any)
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
        self._history.add(written, assignment.origin if is_whole else asked.origin, value)
        self._keep(attribute, depth, asked)

    def _keep(self, attribute: attrs.Attribute[Any], depth: int, assignment: Assignment) -> None:
        """Keep an assignment to a table of `ClassOf`, to be read again by the class once that is known."""
        if class_of(attribute.type):
            place, inside = assignment.path[: depth + 1], assignment.path[depth + 1 :]
            self._kept.setdefault(place, []).append(attrs.evolve(assignment, path=inside))

    def _other_name(self, table: Table, depth: int, assignment: Assignment) -> None:
        """An old name is followed with a warning; any other unknown one is refused."""
        followed = follow(self._context.migrations, assignment)
        if followed is None:
            self._refuse_unknown(table, depth, assignment.path)
        else:
            assignments, warnings = followed
            self.assign_all(assignments)
            self.problems += warnings

    def _refuse_unknown(self, table: Table, depth: int, path: Path) -> None:
        self._unknown += 1
        if self._unknown > MOST_SUGGESTIONS:  # probably another program's file: searching for every name is wasteful
            raise refusal(f"no such field of {table.cls.__name__}", code="unknown field")
        sentence, meant = suggestion(self._root.cls, table.cls, path, depth, self._context.elsewhere)
        self.broken.update(meant)
        if len(meant) == 1:
            raise refusal(f"no such field; {sentence}", code="misspelled field")
        raise refusal(f"no such field of {table.cls.__name__}", hint=sentence, code="unknown field")

    def _build(self, table: Table, path: Path) -> Any:
        changes = {
            name: self._build(change, (*path, name)) if isinstance(change, Table) else change
            for name, change in table.changes.items()
        }
        try:
            built = with_changes(table.base, changes) if changes else table.base
            if self._context.remembers and (changes or table.was_absent or not path):
                leaves = (name for name, change in table.changes.items() if not isinstance(change, Table))
                built = with_written(built, leaves)
            return self._with_named_classes(built, table.base, path) if changes else built
        except (TypeError, ValueError) as error:  # a class may validate several of its fields together
            self.broken.add(dotted(path))
            for problem in problems_of(error):
                whole = ".".join(filter(None, (dotted(path), problem.path)))
                self.problems.append(attrs.evolve(problem, path=whole, place=place_of(whole, self.origins)))
            return table.base

    def _with_named_classes(self, built: object, base: object, path: Path) -> Any:
        """`built` with its tables of `ClassOf` replaced by instances of the classes that other fields name."""
        for name, naming in named_tables_of(type(built)).items():
            if not isinstance(getattr(built, name), Mapping):
                continue
            named_by = self._history.winner((*path, naming.field))
            cls = naming.find(getattr(built, naming.field), self._context.follows(named_by))
            if cls is not None:
                made = self._instance(cls, (*path, name), getattr(base, name))
                built = with_changes(built, {name: made})
        return built

    def _instance(self, cls: type[Any], place: Path, default: object) -> Any:
        """An instance of `cls` from the table's default and what was written into it."""
        inner = TreeBuilder(cls(), self._context)
        if isinstance(default, Mapping) and default:
            inner.assign(Assignment(path=(), value=default, origin=DEFAULT))
        inner.assign_all(self._kept.get(place, ()))
        made, whole = inner.build(), dotted(place) + "."
        docs = {}
        if inner.problems:
            from skyrl.tree.docs import docs_of  # only to say what is wrong

            docs = docs_of(cls)
        for problem in inner.problems:
            hint = problem.hint or " ".join(docs.get(problem.path, "").split())
            self.problems.append(attrs.evolve(problem, path=whole + problem.path, hint=hint))
        self.broken.update(whole + each for each in inner.broken)
        self._history.take_over(inner.origins, place)
        return made


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
