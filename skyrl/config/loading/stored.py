"""Storing a run's configuration in its folder, and reading it back as a layer that can be overridden.

    {"schema_version": 1, "fingerprint": "...", "derived": ["trainer.ref.model.path", ...], "config": {...}}

`config` is the complete resolved tree. Derived paths are listed, so that reading leaves them out and derives them
again.
"""

from __future__ import annotations

from typing import Any, TypeVar

import attrs

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import kind_of
from skyrl.config.loading.migrations import MIGRATIONS
from skyrl.config.loading.resolve import derived, resolve_with_origins
from skyrl.config.loading.standalone_file import put
from skyrl.errors import ConfigError, Problem
from skyrl.tree import evolve_at, fingerprint, get_at
from skyrl.tree.builder import ReadContext, TreeBuilder
from skyrl.tree.dump import SCHEMA_VERSION, public_dict, stored_value
from skyrl.tree.origins import Assignment, Origin, Origins
from skyrl.tree.sparse import sparse
from skyrl.tree.types import display_value

C = TypeVar("C", bound=RunConfig)


def stored_form(run: RunConfig) -> dict[str, Any]:
    """The content of `config.json`, from a resolved tree. Secrets are left out and have to be given again when it is
    read.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint(run),
        "derived": list(derived(run)),
        "config": stored_tree(run),
    }


def stored_tree(run: RunConfig) -> dict[str, Any]:
    """Every field as plain data without secrets, for anything that leaves the process."""
    return public_dict(run)


def as_layer(assignment: Assignment, root: type[RunConfig]) -> Assignment:
    """A stored tree as the layer that a person might have written: without defaults, and without what was derived.

    Raises `ConfigError` for a tree that this version cannot read; a class that is named in it is not imported.
    """
    value = assignment.value
    version = value.get("schema_version", SCHEMA_VERSION)
    if type(version) is not int or version > SCHEMA_VERSION:
        stored = f"was stored with schema version {display_value(version)}"
        message = f"{stored}, but this version reads up to {SCHEMA_VERSION}"
        raise ConfigError([Problem(path=assignment.origin.where, message=message, hint="use a newer skyrl")])
    origin = attrs.evolve(assignment.origin.at("config"), is_stored=True)
    inside = attrs.evolve(assignment, value=value["config"], origin=origin)
    run, _ = _read_tree(inside, root)
    listed = value.get("derived")
    leave_out = [str(path) for path in listed] if isinstance(listed, list) else derived(run)
    tables = sparse(run, root(), leave_out)
    rules, bare = kind_of(root).rules, run
    for rule in rules:
        if rule.writes in leave_out:
            bare = evolve_at(bare, rule.writes, rule.unset)
    rederived, _, _ = resolve_with_origins(bare, {}, leaf_by_leaf=True)
    for rule in rules:  # a written default that a rule would change is written explicitly
        if not rule.placeholder and get_at(rederived, rule.writes) != get_at(run, rule.writes):
            put(tables, rule.writes.split("."), stored_value(get_at(run, rule.writes)))
    return attrs.evolve(inside, value=tables)


def tree_of(stored: object, root: type[C], where: str) -> C:
    """The resolved tree that was stored, under the names of this version; fields that are newer are derived.

    Raises `ConfigError` for a tree that this version cannot read.
    """
    run, origins = _read_tree(Assignment(path=(), value=stored, origin=Origin(kind="file", where=where)), root)
    return resolve_with_origins(run, origins)[0]


def _read_tree(stored: Assignment, root: type[C]) -> tuple[C, Origins]:
    """Reads a stored tree. Old names are followed; no class is imported. Raises `ConfigError`."""
    builder = TreeBuilder(root(), ReadContext(migrations=MIGRATIONS))
    builder.assign(stored)
    run = builder.build()
    errors = [problem for problem in builder.problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors, title=f"{stored.origin.where} cannot be read")
    return run, builder.origins
