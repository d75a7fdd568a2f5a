"""`resolve()`: derives the values that follow from written ones, once and traceably.

`derive/rules.py` has the rules. The result is a new tree; nothing else in the program derives or changes configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from attrs import frozen
from typing_extensions import TypeVar

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import kind_of
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree.origins import Origins
from skyrl.tree.rules import derive, derived_paths

C = TypeVar("C", bound=RunConfig, default=SkyRLTrainConfig)


@frozen(kw_only=True)
class Loaded(Generic[C]):
    """Result of `load`: a tree as it was written and, beside it, dotted path -> origins of each value, winner last."""

    config: C
    origins: Origins
    warnings: tuple[Problem, ...] = ()
    """Warnings about old names that were followed."""


def resolve(config: C | Loaded[C]) -> C:
    """A new tree in which everything that can be derived is. No written value changes; resolving again changes nothing.

    A tree of `load` remembers what was written, the defaults included (`skyrl.tree.classes.written_fields`). In a tree
    made in Python, values that differ from the default count as written, and so does a table that is null by default
    but present: there `weight_sync_backend = "nccl"` cannot be told from an unset field.
    """
    if isinstance(config, Loaded):
        return resolve_with_origins(config.config, config.origins)[0]
    return resolve_with_origins(config, {})[0]


def derived(config: RunConfig) -> tuple[str, ...]:
    """The paths of a resolved tree that are derived from the rest, none of which was written: `resolve` restores their
    values if they are left out.
    """
    return derived_paths(config, kind_of(config).rules)


def resolve_with_origins(
    config: C, origins: Origins, broken: Iterable[str] = (), *, leaf_by_leaf: bool = False
) -> tuple[C, Origins, frozenset[str]]:
    """`resolve`, keeping track of which rule derived what; what cannot be derived from broken paths is broken, too.

    `leaf_by_leaf`: see `derive`.
    """
    return derive(config, kind_of(config).rules, origins, broken, leaf_by_leaf=leaf_by_leaf)
