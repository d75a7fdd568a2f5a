"""The configuration engine: typed, frozen trees that record where each value came from. It depends on no field name.

Read `classes.py` first (what a configuration class is), then `builder.py` (how assignments become a tree) and
`rules.py` (how the rest is derived and checked).
"""

from attrs import field

from skyrl.tree.access import evolve_at, get_at, joined, required
from skyrl.tree.classes import FREE, IDENTITY, frozen
from skyrl.tree.dump import differences, fingerprint, to_dict
from skyrl.tree.frozen import FrozenDict, freeze, thaw
from skyrl.tree.types import Secret

__all__ = [
    "FREE",
    "IDENTITY",
    "FrozenDict",
    "Secret",
    "differences",
    "evolve_at",
    "field",
    "fingerprint",
    "freeze",
    "frozen",
    "get_at",
    "joined",
    "required",
    "thaw",
    "to_dict",
]
