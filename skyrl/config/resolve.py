"""`resolve()`: everything that follows from what was written, derived once, in the open.

`rules.py` has the rules. The result is a new tree; nothing else in the program derives or changes configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from skyrl.config.entry import RunConfig
from skyrl.config.kinds import kind_of
from skyrl.tree.origins import Origins
from skyrl.tree.rules import derive, derived_paths

C = TypeVar("C", bound=RunConfig)


def resolve(config: C) -> C:
    """A new tree in which everything that can be derived is. Resolving it again changes nothing."""
    return resolve_with_origins(config, {})[0]


def derived(config: RunConfig) -> tuple[str, ...]:
    """The paths of a resolved tree that follow from the rest: `resolve` gives them again when they are left out."""
    return derived_paths(config, kind_of(config).rules)


def resolve_with_origins(config: C, origins: Origins, broken: Iterable[str] = ()) -> tuple[C, Origins, frozenset[str]]:
    """`resolve`, keeping track of which rule derived what; what cannot be derived from broken paths is broken, too."""
    return derive(config, kind_of(config).rules, origins, broken)
