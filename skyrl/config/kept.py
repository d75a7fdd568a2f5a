"""A configuration as a single self-contained file, for a run that starts later and elsewhere."""

from __future__ import annotations

from typing import Any

from skyrl.config.entry import RunConfig
from skyrl.config.kinds import header_of
from skyrl.tree.masking import masked
from skyrl.tree.origins import Origins
from skyrl.tree.sparse import as_toml_has_it, sparse


def kept_text(written: RunConfig, origins: Origins) -> str:
    """TOML that reproduces the tree as written, independent of the files that it was read from.

    Derived values are left out, so that the machine that runs it derives them. A value that came from `env:NAME` stays
    a reference, and no secret is written.
    """
    import tomli_w

    root = type(written)
    tables: dict[str, Any] = header_of(root) | masked(sparse(written))
    for path, chain in origins.items():
        if chain and chain[-1].kind == "environment":
            _put(tables, path.split("."), f"env:{chain[-1].where}")
    return tomli_w.dumps(as_toml_has_it(tables, root))


def _put(tables: dict[str, Any], names: list[str], value: object) -> None:
    for name in names[:-1]:
        inner = tables.setdefault(name, {})
        if not isinstance(inner, dict):
            return  # a list written as a whole
        tables = inner
    tables[names[-1]] = value
