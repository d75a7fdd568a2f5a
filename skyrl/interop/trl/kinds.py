"""Tells which trainer and version TRL's arguments are for, by those that only some trainers and versions have."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from skyrl.interop.peer_trees import PeerTree, peer_trees

PREFERENCES = ("dpo", "kto")
"""Trainers of preferences without a reward model."""

CONVERTED = ("grpo", "rloo", "sft", "reward", *PREFERENCES, "distillation", "gkd")
"""Trainers whose runs are converted, by the names of their commands."""

_OWN = {"gkd": {"lmbda", "seq_kd"}}
"""Trainer that has all arguments of another one -> those that tell it."""


@cache
def _trees(kind: str) -> tuple[PeerTree, ...]:
    """The trees of a trainer: open-r1's, then TRL's, oldest first."""
    return (*peer_trees("trl", f"open_r1_{kind}"), *peer_trees("trl", kind))


def trainers_with(keys: Iterable[str]) -> list[str]:
    """The trainers that know the most of these arguments: one where they tell, several where they do not."""
    written = set(keys)
    known = {
        kind: max((len(written & tree.defaults.keys()) for tree in _trees(kind)), default=0)
        for kind in CONVERTED
        if kind not in _OWN or written & _OWN[kind]
    }
    most = max(known.values())
    return [kind for kind, number in known.items() if number == most]


def kinds_with(key: str) -> list[str]:
    """The trainers that have an argument."""
    return [kind for kind in CONVERTED if any(key in tree.defaults for tree in _trees(kind))]


def tree_of(kind: str, keys: Iterable[str]) -> tuple[PeerTree, str]:
    """The tree that has the most of the arguments, the newest of several, and a remark that names its version if the
    arguments tell it from the others.
    """
    trees = _trees(kind)
    written = {key.partition(".")[0] for key in keys}
    known = [len(written & tree.defaults.keys()) for tree in trees]
    best = max(range(len(trees)), key=lambda at: (known[at], at))
    versions = {tree.version for tree, number in zip(trees, known, strict=True) if number == known[best]}
    if len(versions) > 1:
        return trees[best], ""
    recipe = " with those of open-r1" if trees[best].kind.startswith("open_r1_") else ""
    others = ", ".join(dict.fromkeys(tree.version for tree in trees))
    return trees[best], (
        f"The arguments are those of TRL {trees[best].version}{recipe}, as far as versions are known here ({others}): "
        "its defaults were used."
    )
