"""The reference of every field as one Markdown page, made from the classes: `skyrl config docs`."""

from __future__ import annotations

import inspect
import json
from typing import Any

from skyrl.config.kinds import kind_of
from skyrl.tree.classes import fields_of, role_of, table_class
from skyrl.tree.docs import docs_of
from skyrl.tree.dump import stored_value
from skyrl.tree.types import describe
from skyrl.tree.validators import wanted_by

_HEAD = """# Every field

One section for each table. `identity` fields say which run it is, `numerics` fields change its numbers (both are in the
fingerprint), `free` ones neither.
"""


def reference_page(run: Any) -> str:
    """The page for the tree `run`, whose tables may be of a user's own classes."""
    return "\n".join([_HEAD, *_table(run, type(run)(), "", type(run))])


def _table(table: Any, defaults: Any, path: str, root: type[Any]) -> list[str]:
    cls = type(table)
    defaults = defaults if type(defaults) is cls else cls()
    docs, lines, inner = docs_of(cls), [f"## {path or 'The root'}", ""], []
    lines += [" ".join((inspect.getdoc(cls) or "").split()), ""]
    for name, attribute in fields_of(cls).items():
        here = f"{path}.{name}" if path else name
        value = getattr(table, name)
        nested = table_class(attribute, value)
        if nested is not None:
            inner += _table(nested() if value is None else value, getattr(defaults, name) or nested(), here, root)
            continue
        default = json.dumps(stored_value(getattr(defaults, name)), ensure_ascii=False)
        allowed = wanted_by(attribute.validator)
        facts = [describe(attribute.type), f"{allowed}" if allowed else "", f"default `{default}`", role_of(attribute)]
        lines += [f"- **`{name}`** ({'; '.join(filter(None, facts))})", *_sentences(here, docs.get(name, ""), root)]
    return [*lines, "", *inner]


def _sentences(path: str, doc: str, root: type[Any]) -> list[str]:
    """Meaning of the field, when it acts, what derives it, and whether this version reads it."""
    kind, found = kind_of(root), [" ".join(doc.split())]
    found += [f"Has an effect when {each.when}." for each in kind.effects if _covers(each.path, path)]
    found += [f"Derived by `{each.name}` where it is not written." for each in kind.rules if each.writes == path]
    missing = [each.what for each in kind.unimplemented if _covers(each.path, path)]
    found += [f"Not read in this version yet: {what}." for what in missing[:1]]
    return [f"  {sentence}" for sentence in found if sentence]


def _covers(entry: str, path: str) -> bool:
    return path == entry or path.startswith(entry + ".")
