"""The reference of every field in Markdown, made from the classes: `skyrl config docs` and the pages of docs/fields."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import attrs

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.foreign_names import names_elsewhere
from skyrl.config.loading.kinds import kind_of
from skyrl.errors import ConfigError, Problem
from skyrl.tree import joined
from skyrl.tree.arguments import split_path
from skyrl.tree.classes import docs_of, fields_of, resume_role, table_class
from skyrl.tree.dump import stored_value
from skyrl.tree.suggestions import suggestion
from skyrl.tree.types import describe
from skyrl.tree.validators import requirement_of

CHANGES = """A resumed run may change a field freely, with `resume_with_changes`, or never, because it would be another
run. Fields that may not change freely are in the fingerprint."""

_ON_RESUME = {"identity": "never", "numerics": "with `resume_with_changes`", "free": "freely"}

_HEAD = f"""# Every field

One section for each table, with a heading for each field.

{CHANGES}
"""


@attrs.frozen
class TableReference:
    """A table of a run's tree."""

    path: str
    """Dotted path; empty for the root."""

    values: object

    defaults: object
    """An instance of the same class, with the values that the tree has where nothing is written."""

    @property
    def meaning(self) -> str:
        """The docstring of its class, in one line."""
        return " ".join((inspect.getdoc(type(self.values)) or "").split())

    def inner(self) -> Iterator[TableReference]:
        """The tables in it, and those in them."""
        for name, attribute in fields_of(type(self.values)).items():
            value = getattr(self.values, name)
            nested = table_class(attribute, value)
            if nested is not None:
                values = nested() if value is None else value
                defaults = getattr(self.defaults, name)
                same = type(defaults) is type(values)
                table = TableReference(self.at(name), values, defaults if same else type(values)())
                yield table
                yield from table.inner()

    def fields(self) -> dict[str, attrs.Attribute[Any]]:
        """Dotted path of each of its own fields, tables apart, and the field."""
        named = fields_of(type(self.values)).items()
        return {self.at(name): field for name, field in named if not table_class(field, getattr(self.values, name))}

    def at(self, name: str) -> str:
        """The path of a field of the table."""
        return joined(self.path, name)


def tables(run: RunConfig) -> list[TableReference]:
    """All tables of the tree `run`, the root first; they may be instances of a user's own classes."""
    root = TableReference("", run, type(run)())
    return [root, *root.inner()]


def reference_page(run: RunConfig) -> str:
    """The page for the tree `run`, whose tables may be instances of a user's own classes."""
    return "\n".join([_HEAD, *(section(table, type(run)) for table in tables(run))])


def reference_section(run: RunConfig, path: str) -> str:
    """The part of the page for a table, with the tables in it, or for a single field.

    Raises `ConfigError` for a path that does not exist, and suggests a similar one.
    """
    table, names = tables(run)[0], split_path(path)
    for depth, name in enumerate(names):
        if name not in fields_of(type(table.values)):
            cls = type(table.values)
            sentence, _ = suggestion(type(run), cls, names, depth, names_elsewhere)
            problem = Problem(path=path, message="no such field", hint=sentence)
            raise ConfigError([problem], title="There is nothing to print")
        prefix = ".".join(names[: depth + 1])
        if prefix in table.fields():
            return "\n".join(_field(table, prefix, type(run), ()))
        table = next(inner for inner in table.inner() if inner.path == prefix)
    return "\n".join(section(item, type(run)) for item in (table, *table.inner()))


def section(table: TableReference, root: type[Any]) -> str:
    """Section of a table: its meaning, the conditions that all of its own fields share, and each field."""
    lines, fields = [f"## {table.path or 'The root'}", "", table.meaning, ""], table.fields()
    conditions = [_conditions(path, root) for path in fields] or [_conditions(table.path, root)]
    shared = tuple(when for when in conditions[0] if all(when in others for others in conditions))
    lines += _acting(shared, "These fields act")
    for path in fields:
        lines += _field(table, path, root, shared)
    return "\n".join(lines)


def _field(table: TableReference, path: str, root: type[Any], shared: tuple[str, ...]) -> list[str]:
    """One field: its facts in a line, its meaning, conditions other than the shared ones, and its rule."""
    attribute = table.fields()[path]
    default = json.dumps(stored_value(getattr(table.defaults, attribute.name)), ensure_ascii=False)
    facts = {
        "Type": describe(attribute.type),
        "Allowed": requirement_of(attribute.validator),
        "Default": f"`{default}`",
        "May change on resume": _ON_RESUME[resume_role(attribute)],
    }
    lines = [f"### {path}", "", " ".join(f"{name}: {fact}." for name, fact in facts.items() if fact), ""]
    if doc := docs_of(type(table.values)).get(attribute.name):
        lines += [doc, ""]
    lines += _acting(tuple(when for when in _conditions(path, root) if when not in shared), "Acts")
    for rule in kind_of(root).rules:
        if rule.writes == path:
            sources = ", ".join(f"`{read}`" for read in rule.reads)
            origin = f"Derived where it is not written{sources and ' from '}{sources} (`{rule.name}`): {rule.reason}"
            lines += [origin, ""]
    return lines


def _conditions(path: str, root: type[Any]) -> tuple[str, ...]:
    """The conditions under which a field has an effect, in words; one that another begins with is left out."""
    covering = {effect.condition.words for effect in kind_of(root).effects if effect.covers(path)}
    return tuple(sorted(when for when in covering if not any(other.startswith(f"{when} and ") for other in covering)))


def _acting(conditions: tuple[str, ...], subject: str) -> list[str]:
    return [f"{subject} only when {', and when '.join(conditions)}.", ""] if conditions else []
