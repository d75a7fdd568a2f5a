"""Our names for the settings of other systems, for suggestions.

`foreign_names.json` is made from the tables of the converters by `make pages`. It is read only for a message about an
unknown name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from functools import cache
from pathlib import Path as File

from skyrl.tree.classes import leaf_paths
from skyrl.tree.origins import Path, dotted
from skyrl.tree.rules import join_choices

_MOST = 3
"""Largest number of paths in a suggestion."""


def names_elsewhere(root: type[object], path: Path) -> tuple[str, list[str]]:
    """A sentence for a path that is a setting of another system, and the paths of the tree of class `root` that set it.

    Settings match from their last name on, so that `trainer.lora.r` is PEFT's `r`. Of several, those count that have
    the most names in common, then those nearest to the path, then those that most systems agree on.
    """
    candidates = Counter[tuple[int, int, tuple[str, ...]]]()
    systems: dict[tuple[str, ...], dict[str, str]] = {}
    leaves = frozenset(leaf for leaf, _ in leaf_paths(root))
    for system, names, paths in _settings():
        ours = tuple(filter(None, (_field_of_kind(item, leaves) for item in paths)))
        alike = _common_end(path, names)
        if alike and len(ours) == len(paths):
            near = max(len(_words(path[:-1]) & _words(entry.split(".")[:-1])) for entry in ours)
            candidates[alike, near, ours] += 1
            systems.setdefault(ours, {}).setdefault(system, ".".join(names[-alike:]))
    if not candidates:
        return "", []
    best = max((alike, near, votes) for (alike, near, _), votes in candidates.items())
    chosen = [ours for (alike, near, ours), votes in candidates.items() if (alike, near, votes) == best]
    meant = list(dict.fromkeys(_sibling_field(path, our, leaves) for ours in chosen for our in ours))
    if len(meant) > _MOST:
        return "", []
    who = {system: name for ours in chosen for system, name in systems[ours].items()}
    either = "or" if len(chosen) > 1 else "and"
    theirs = f"{next(iter(who.values()))} of {join_choices(list(who), 'and')}"
    return f"use {join_choices(meant, either)} instead ({theirs})", meant


def value_elsewhere(field: str, value: str) -> str:
    """A sentence for a value of a field that only other systems have; empty if none is known to have it."""
    target = tuple(f"{field}={value.lower().replace('-', '_')}".split("."))
    for system, names, assignments in _settings():
        if names == target:
            ours = [assignment.replace("=", " = ") for assignment in assignments]
            bare_value = ours[0].removeprefix(f"{field} = ") if len(ours) == 1 else ""
            return f"use {bare_value or join_choices(ours, 'and')} instead ({value} of {system})"
    return ""


@cache
def _settings() -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """(system, names of the setting, our paths)."""
    text = File(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return tuple((system, tuple(key.split(".")), tuple(paths)) for system, key, paths in json.loads(text))


def _field_of_kind(path: str, leaves: Collection[str]) -> str:
    """The path, or the same field of a supervised run; empty if there is none."""
    spellings = (path, path.removeprefix("trainer.policy."), path.removeprefix("trainer."))
    return next((spelling for spelling in spellings if spelling in leaves), "")


def _sibling_field(path: Path, ours: str, leaves: Collection[str]) -> str:
    """The field called like ours in the table that the path is in, such as that of another model; else ours."""
    sibling = dotted((*path[:-1], ours.rpartition(".")[2]))
    return sibling if sibling in leaves else ours


def _common_end(path: Path, names: Path) -> int:
    """Number of names that two paths have in common at their ends."""
    pairs = zip(reversed(path), reversed(names), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a.lower() != b.lower()), min(len(path), len(names)))


def _words(names: Collection[str]) -> set[str]:
    return {word for name in names for word in re.split("[._]", name)}
