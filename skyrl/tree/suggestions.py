"""Suggestions for paths that do not exist in a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from skyrl.tree.classes import fields_of, leaf_paths, table_paths
from skyrl.tree.names import LONGEST, alike, shared, slips
from skyrl.tree.origins import Path
from skyrl.tree.types import remembered

_MOST = 3
"""Largest number of suggestions in one message."""


Elsewhere = Callable[[type[Any], Path], tuple[str, list[str]]]
"""A sentence for a path that is a setting of another system, and the paths of the root that it names."""


def no_other_system(root: type[Any], path: Path) -> tuple[str, list[str]]:
    """No other system is known."""
    return "", []


def suggestion(
    root: type[Any], owner: type[Any], path: Path, depth: int, elsewhere: Elsewhere = no_other_system
) -> tuple[str, list[str]]:
    """A sentence for the unknown name `path[depth]` in the table `owner`, and the paths of `root` that it names.

    Order of likelihood: a sibling with a small typo, the same name elsewhere in the tree, a name that another system
    has for a field (`elsewhere`), a roughly similar name.
    """
    name, siblings = path[depth], tuple(fields_of(owner))
    if max(map(len, path)) > LONGEST:
        return "", []
    last_names = _last_names(root)
    everywhere = last_names.keys()
    tail = "." + ".".join(path[depth:])

    def near(candidates: Iterable[str]) -> list[str]:
        return sorted(candidates, key=lambda candidate: -shared(path, candidate.split(".")))[:_MOST]

    if corrections := _replaced_at(path, depth, slips(name, siblings), everywhere):
        return f"did you mean {_or(corrections)}?", corrections
    sentence, foreign = elsewhere(root, path)
    if foreign and not any(last_names[item] == path[-1] for item in foreign):
        return sentence, foreign
    if homes := near(item for item in everywhere if f".{item}".endswith(tail)):
        return f"use {_or(homes)} instead", homes
    if foreign:
        return sentence, foreign
    if corrections := _replaced_at(path, depth, alike(name, siblings), everywhere):
        return f"did you mean {_or(corrections)}?", corrections
    names = slips(path[-1], last_names.values()) or alike(path[-1], last_names.values())
    if homes := near(
        entry for entry in everywhere if last_names[entry] in names and {*path[:-1]} < {*entry.split(".")}
    ):
        return f"did you mean {_or(homes)}?", homes
    words = _words(path)
    if homes := near(
        element for element in everywhere if last_names[element] == path[-1] and words <= _words(element.split("."))
    ):
        return f"did you mean {_or(homes)}?", homes
    return "", []


@remembered
def _last_names(root: type[Any]) -> dict[str, str]:
    """Every path of the tree, tables and leaves -> the last of its names."""
    everywhere = dict.fromkeys([*table_paths(root), *(leaf for leaf, _ in leaf_paths(root))])
    return {item: item.rpartition(".")[2] for item in everywhere}


def _replaced_at(path: Path, depth: int, names: Iterable[str], everywhere: Collection[str]) -> list[str]:
    """The path with each of `names` put at `depth`: the full paths that exist, else the paths cut after that name."""
    cut = [(*path[:depth], name) for name in names][:_MOST]
    full_paths = [".".join((*item, *path[depth + 1 :])) for item in cut]
    return [entry for entry in full_paths if entry in everywhere] or [".".join(element) for element in cut]


def _words(names: Iterable[str]) -> set[str]:
    """The words of all names: `critic_optimizer.lr` has critic, optimizer and lr."""
    return {word for name in names for word in name.split("_")}


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
