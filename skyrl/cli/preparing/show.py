"""`skyrl config show`: prints a tree in any of its forms and three languages, with or without origins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import kind_of
from skyrl.tree.access import get_at
from skyrl.tree.arguments import split_path
from skyrl.tree.dump import flatten, public_dict, public_value
from skyrl.tree.origins import Origins, place_of
from skyrl.tree.rules import is_whole


def dump(data: Mapping[str, Any], language: str, of: object) -> str:
    """Nested data of a tree, or of a class where there is no tree, as text without a final newline. Raises
    `ConfigError` for a null that TOML cannot express.
    """
    if language == "json":
        return json.dumps(data, indent=2, ensure_ascii=False)
    if language == "yaml":
        from skyrl.tree.yaml_file import yaml_text

        return yaml_text(data).rstrip("\n")
    import tomli_w

    from skyrl.tree.sparse import as_toml_has_it

    return tomli_w.dumps(as_toml_has_it(data, of)).rstrip("\n")


def full_tree(run: RunConfig, language: str) -> str:
    """Every field as text, without secrets."""
    return dump(public_dict(run), language, run)


def written_text(run: RunConfig, language: str) -> str:
    """`full_tree` before anything is derived, without the fields that are left to a rule."""
    data = public_dict(run)
    for rule in kind_of(run).rules:
        *tables, name = rule.writes.split(".")
        table = reduce(lambda inner, part: inner[part] or {}, tables, data)
        is_given = rule.table and table and is_whole(get_at(run, rule.table))
        if name in table and not rule.placeholder and not is_given and rule.applies(run, ()):
            del table[name]
    return dump(data, language, run)


def lines_with_origins(run: RunConfig, origins: Origins, kept: Mapping[str, Any] | None = None) -> str:
    """Every field on a separate line, as TOML; values that are not defaults have their place as a comment. With `kept`,
    only fields that these nested tables have.
    """
    flat = flatten(run, leaf=public_value)
    if kept is not None:
        flat = {path: value for path, value in flat.items() if _has(kept, split_path(path))}
    rows = [(path, f"{path} = {json.dumps(value, ensure_ascii=False)}") for path, value in flat.items()]
    placed = [(row, place_of(path, origins)) for path, row in rows]
    width = min(max((len(row) for row, location in placed if location), default=0), 88)
    return "\n".join(f"{row:<{width}}  # {location}" if location else row for row, location in placed)


def _has(tables: object, names: Sequence[str]) -> bool:
    """Whether nested tables have a field at this path."""
    for name in names:
        if not isinstance(tables, Mapping) or name not in tables:
            return False
        tables = tables[name]
    return True


def derived_lines(run: RunConfig, origins: Origins) -> str:
    """Derived values, each with its rule, the reason, and the values from which it was derived."""
    by_name = {rule.name: rule for rule in kind_of(run).rules}
    flat, paragraphs = flatten(run, leaf=public_value), []
    for path, chain in origins.items():
        if chain[-1].kind != "rule":
            continue
        rule = by_name[chain[-1].where]
        inside = {key: value for key, value in flat.items() if key == path or key.startswith(path + ".")}
        values = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in inside.items()]
        sources = [f"{read} = {json.dumps(flat.get(read), ensure_ascii=False)}" for read in rule.reads]
        paragraphs.append(
            "\n".join([*values, f"    {rule.name}: {rule.reason}", *(f"    from {source}" for source in sources)])
        )
    return "\n".join(paragraphs)
