"""A configuration as a single self-contained file, for a run that starts later and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import header_of, kind_of
from skyrl.errors import ConfigError, Problem
from skyrl.tree import get_at
from skyrl.tree.arguments import split_path
from skyrl.tree.dump import public_value, stored_value
from skyrl.tree.masking import SHOWN
from skyrl.tree.origins import Origins, dotted, place_of
from skyrl.tree.rules import is_whole
from skyrl.tree.sparse import as_toml_has_it, sparse


def kept_text(written: RunConfig, origins: Origins) -> str:
    """TOML that reproduces the tree as written, independent of the files that it was read from.

    What was written stands in it, the defaults included; derived values are left out, so that the machine that runs it
    derives them. A value that came from `env:NAME` stays a reference. Raises `ConfigError` for a secret that was
    written as it is, and for a null that TOML cannot express.
    """
    import tomli_w

    tables, public_tables = (kept_tables(written, origins, leaf) for leaf in (stored_value, public_value))
    problems = [
        Problem(
            path=dotted(path),
            message="is a secret, which would be written into the file that is handed on",
            hint='write "env:NAME" as the whole value, and set that variable where the run starts',
            location=place_of(dotted(path), origins),
        )
        for path in _differing(tables, public_tables)
    ]
    if problems:
        raise ConfigError(problems, title="This run cannot be handed on")
    return tomli_w.dumps(as_toml_has_it(tables, written))


def kept_tables(
    written: RunConfig, origins: Origins, leaf: Callable[[object], object] = public_value
) -> dict[str, Any]:
    """The content of a file that reproduces the tree as written; `leaf` gives the form of a value."""
    tables: dict[str, Any] = header_of(type(written)) | sparse(written, leaf=leaf)
    for rule in kind_of(written).rules:  # a table that was given as one instance is not filled
        if rule.table and get_at(written, rule.table) is not None and is_whole(get_at(written, rule.table)):
            put(tables, rule.writes.split("."), leaf(get_at(written, rule.writes)))
    for names, variable in _variables(origins):
        put(tables, names, f"env:{variable}")
    return cast(dict[str, Any], _secret_references(tables))


def _variables(origins: Origins) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paths whose values come from environment variables, each with the variable: a leaf, or a table of which no other
    place gave a part.
    """
    variables: dict[tuple[str, ...], str] = {}
    others: set[tuple[str, ...]] = set()
    for path, chain in origins.items():
        names, origin = split_path(path), chain[-1]
        if origin.kind == "environment":
            names = names[: len(names) - len(origin.path)]  # the variable has a table with the names after these
            if variables.setdefault(names, origin.where) != origin.where:
                others.add(names)
        others |= {names[:depth] for depth in range(1, len(names))}
    yield from ((names, variable) for names, variable in variables.items() if names not in others)


def put(tables: dict[str, object], names: Sequence[str], value: object) -> None:
    """Sets a value in nested tables; not inside a list, which is written as a whole."""
    for name in names[:-1]:
        inner = tables.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        tables = inner
    tables[names[-1]] = value


def _secret_references(value: object) -> object:
    """The data with `env:NAME` for each `Secret`."""
    if isinstance(value, Mapping):
        return {key: _secret_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_secret_references(item) for item in value]
    match = SHOWN.fullmatch(value) if isinstance(value, str) else None
    return f"env:{match[1]}" if match else value


def _differing(one: object, other: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the values that differ between two trees of one shape."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for name in one:
            yield from _differing(one[name], other[name], (*path, name))
    elif one != other:
        yield path
