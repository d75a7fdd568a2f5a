"""The reference of every field as one Markdown page, made from the classes: `skyrl config docs`."""

from __future__ import annotations

import inspect
import json
from typing import Any

import attrs

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.foreign_names import names_elsewhere
from skyrl.config.loading.kinds import kind_of
from skyrl.errors import ConfigError, Problem
from skyrl.tree.arguments import split_path
from skyrl.tree.classes import fields_of, role_of, table_class
from skyrl.tree.docs import docs_of
from skyrl.tree.dump import stored_value
from skyrl.tree.suggestions import suggestion
from skyrl.tree.types import describe
from skyrl.tree.validators import wanted_by

_HEAD = """# Every field

One section for each table. `identity` fields say which run it is, `numerics` fields change its numbers (both are in the
fingerprint), `free` ones neither.
"""


def reference_page(run: RunConfig) -> str:
    """The page for the tree `run`, whose tables may be instances of a user's own classes."""
    return "\n".join([_HEAD, *_table(run, type(run)(), "", type(run))])


def reference_section(run: RunConfig, path: str) -> str:
    """The part of the page for a table, with the tables in it, or for a single field.

    Raises `ConfigError` for a path that does not exist, and suggests a similar one.
    """
    table, defaults, names = run, type(run)(), split_path(path)
    for depth, name in enumerate(names):
        attribute = fields_of(type(table)).get(name)
        if attribute is None:
            sentence, _ = suggestion(type(run), type(table), names, depth, names_elsewhere)
            raise ConfigError([Problem(path=path, message="no such field", hint=sentence)], title=_NOTHING)
        value, nested = getattr(table, name), table_class(attribute, getattr(table, name))
        if nested is None:
            return "\n".join(_field(table, defaults, attribute, ".".join(names[: depth + 1]), type(run)))
        table = nested() if value is None else value
        defaults = getattr(defaults, name, None) or nested()
    return "\n".join(_table(table, defaults, path, type(run)))


_NOTHING = "There is nothing to print"


def _table(table: object, defaults: object, path: str, root: type[Any]) -> list[str]:
    cls = type(table)
    defaults = defaults if type(defaults) is cls else cls()
    lines, inner = [f"## {path or 'The root'}", ""], []
    lines += [" ".join((inspect.getdoc(cls) or "").split()), ""]
    for name, attribute in fields_of(cls).items():
        here = f"{path}.{name}" if path else name
        value = getattr(table, name)
        nested = table_class(attribute, value)
        if nested is not None:
            inner += _table(nested() if value is None else value, getattr(defaults, name) or nested(), here, root)
            continue
        lines += _field(table, defaults, attribute, here, root)
    return [*lines, "", *inner]


def _field(table: object, defaults: object, attribute: attrs.Attribute[Any], path: str, root: type[Any]) -> list[str]:
    """One field of `table`: type, allowed values, default and role, then its meaning."""
    default = json.dumps(stored_value(getattr(defaults, attribute.name)), ensure_ascii=False)
    facts = [describe(attribute.type), wanted_by(attribute.validator), f"default `{default}`", role_of(attribute)]
    doc = docs_of(type(table)).get(attribute.name, "")
    return [f"- **`{attribute.name}`** ({'; '.join(filter(None, facts))})", *_sentences(path, doc, root)]


def _sentences(path: str, doc: str, root: type[Any]) -> list[str]:
    """Meaning of the field, condition under which it has an effect, and rule that derives it."""
    kind, found = kind_of(root), [" ".join(doc.split())]
    found += [f"Has an effect when {each.when}." for each in kind.effects if _covers(each.path, path)]
    found += [f"Derived by `{each.name}` where it is not written." for each in kind.rules if each.writes == path]
    return [f"  {sentence}" for sentence in found if sentence]


def _covers(entry: str, path: str) -> bool:
    return path == entry or path.startswith(entry + ".")
