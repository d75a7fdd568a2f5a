"""Reads AReaL's YAML files as Hydra composes them: other files first, then the file's own settings, then changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.values import REFERENCE, flat_file

_SELF, _WHOLE = "_self_", "@_global_"
_DEEPEST = 10


def read_experiment(name: str, depth: int = 0) -> dict[str, Any]:
    """The settings of a file and of those in its list `defaults`, as flat keys. What the list names in another way, or
    what is not there, stays in it. Raises `ConfigError`.
    """
    keys = flat_file(name, of="areal")
    listed = keys.get("defaults")
    if not isinstance(listed, list) or depth > _DEEPEST:
        return keys
    composed: dict[str, Any] = {}
    unread: list[Any] = []
    own = {key: value for key, value in keys.items() if key != "defaults"}
    for item in listed if _SELF in listed else [*listed, _SELF]:
        file = Path(name).parent / f"{str(item).removesuffix(_WHOLE).removesuffix('.yaml')}.yaml"
        if item == _SELF:
            composed = merged(composed, own)
        elif isinstance(item, str) and (_WHOLE in item or "/" not in item) and "@" not in file.name and file.is_file():
            composed = merged(composed, read_experiment(str(file), depth + 1))
        else:
            unread.append(item)
    return composed | ({"defaults": unread} if unread else {})


def merged(keys: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with the changes: a table changes some settings of another one, any other value takes its place."""
    tables = tuple(f"{key}{end}" for key, value in changes.items() for end in ".[" if value != {})
    above = {key[:at] for key in changes for at, letter in enumerate(key) if letter in ".["}
    kept = {key: value for key, value in keys.items() if not key.startswith(tables) and key not in above}
    return {**kept, **{key: value for key, value in changes.items() if value != {} or key not in kept}}


def with_defaults_of_references(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that others refer to and that the file omits, with AReaL's newest defaults."""
    named = {match for value in keys.values() if isinstance(value, str) for match in REFERENCE.findall(value)}
    trees = [tree for kind in ("SFTConfig", "GRPOConfig") for tree in peer_trees("areal", kind)[-1:]] if named else []
    known = {key: value for tree in trees for key, value in tree.defaults.items() if value is not None}
    return {name: known[name] for name in sorted(named - keys.keys()) if name in known}
