"""All settings of other systems with their defaults, by version: files of `trees/`, made by `make peer-trees`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

_TREES = Path(__file__).parent / "trees"


@frozen(kw_only=True)
class PeerTree:
    """The settings of one kind of run in one version of another system."""

    system: str
    """Name of the system, as in `skyrl config convert --from`."""

    version: str
    kind: str
    """The system's own name for the kind of run: its program, its class of arguments or its file."""

    source: str
    """The file that defines the settings."""

    defaults: Mapping[str, Any]
    """Dotted key of each setting -> its default; null for a setting that has to be given."""


@cache
def peer_trees(system: str, kind: str) -> tuple[PeerTree, ...]:
    """The trees of a kind of run, oldest version first; none if there is no such system or kind."""
    trees = [PeerTree(**json.loads(path.read_text("utf-8"))) for path in _TREES.glob(f"{system}-{kind}-*.json")]
    return tuple(sorted(trees, key=lambda tree: [int(part) for part in tree.version.split(".")]))


@cache
def settings_by_system() -> Mapping[str, frozenset[str]]:
    """All settings that a system has in any version and kind of run, by the name of the system."""
    keys_by_system: dict[str, set[str]] = {}
    for path in _TREES.glob("*.json"):
        tree = json.loads(path.read_text("utf-8"))
        keys_by_system.setdefault(tree["system"], set()).update(tree["defaults"])
    return {system: frozenset(keys) for system, keys in keys_by_system.items()}


def versions_with(trees: Iterable[PeerTree], keys: Iterable[str]) -> list[str]:
    """Versions whose trees have the most of these keys, oldest first: the versions that a file is of."""
    written = set(keys)
    known = {tree.version: len(written & tree.defaults.keys()) for tree in trees}
    most = max(known.values(), default=0)
    return [version for version, number in known.items() if number == most and most]
