"""What was meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, cast

from skyrl.tree.classes import fields_of, leaf_paths, table_paths
from skyrl.tree.origins import Path

_MOST = 3
"""Suggestions that one message makes."""

_LONGEST = 100
"""Characters of the longest name that a near one is looked for."""


def suggestion(root: type[Any], owner: type[Any], path: Path, depth: int) -> tuple[str, list[str]]:
    """A sentence for the unknown name `path[depth]` in the table `owner`, and the paths of `root` that it names.

    A sibling one slip away is meant more likely than the same name elsewhere, and that more than a name somewhat alike.
    """
    name, siblings = path[depth], tuple(fields_of(owner))
    if max(map(len, path)) > _LONGEST:
        return "", []
    last_names = _last_names(cast(Any, root))
    everywhere = last_names.keys()
    tail = "." + ".".join(path[depth:])

    def near(candidates: Iterable[str]) -> list[str]:
        return sorted(candidates, key=lambda each: -_names_shared(path, each))[:_MOST]

    if beside := _in_place_of(path, depth, slips(name, siblings), everywhere):
        return f"did you mean {_or(beside)}?", beside
    if homes := near(each for each in everywhere if f".{each}".endswith(tail)):
        return f"this name belongs at {_or(homes)}", homes
    if beside := _in_place_of(path, depth, alike(name, siblings), everywhere):
        return f"did you mean {_or(beside)}?", beside
    names = slips(path[-1], last_names.values()) or alike(path[-1], last_names.values())
    if homes := near(each for each in everywhere if last_names[each] in names and {*path[:-1]} < {*each.split(".")}):
        return f"did you mean {_or(homes)}?", homes
    return "", []


@cache
def _last_names(root: Any) -> dict[str, str]:
    """Every path of the tree, tables and leaves, with the last of its names."""
    everywhere = dict.fromkeys([*table_paths(root), *(leaf for leaf, _ in leaf_paths(root))])
    return {each: each.rpartition(".")[2] for each in everywhere}


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that `name` is most likely a slip of, if any is close."""
    if len(name) > _LONGEST:
        return None
    return next(iter(slips(name, candidates) or alike(name, candidates)), None)


def slips(name: str, candidates: Iterable[str]) -> list[str]:
    """Candidates that differ by a letter more, less or other, by two neighbours exchanged, or in case and dashes."""
    return [candidate for candidate in candidates if _is_slip(_folded(name), _folded(candidate))]


def alike(name: str, candidates: Iterable[str]) -> list[str]:
    """The candidate that shares most letters with `name`, if it is most of them, or those of which `name` is an end."""
    from difflib import get_close_matches

    folded = {_folded(candidate): candidate for candidate in candidates}
    wanted = _folded(name)
    close = get_close_matches(wanted, folded, n=1, cutoff=0.7)
    if not close and len(wanted) > 3:
        close = [key for key in folded if key.startswith(wanted) or key.endswith("_" + wanted)]
    return [folded[key] for key in close]


def _is_slip(one: str, other: str) -> bool:
    start = _shared(one, other)
    one, other = one[start:], other[start:]
    end = _shared(one[::-1], other[::-1])
    one, other = one[: len(one) - end], other[: len(other) - end]
    return max(len(one), len(other)) < 2 or (len(one) == 2 and one == other[::-1])


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def _in_place_of(path: Path, depth: int, names: Iterable[str], everywhere: Collection[str]) -> list[str]:
    """The paths with each of `names` at `depth`: those that exist as a whole, else those that exist as far as there."""
    cut = [(*path[:depth], name) for name in names][:_MOST]
    whole = [".".join((*each, *path[depth + 1 :])) for each in cut]
    return [each for each in whole if each in everywhere] or [".".join(each) for each in cut]


def _names_shared(path: Path, other: str) -> int:
    return _shared(path, other.split("."))


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
