"""Result of `load`: a tree as it was written, and the origin of each of its values."""

from __future__ import annotations

from typing import Generic

from attrs import frozen
from typing_extensions import TypeVar

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree.origins import Origins

C = TypeVar("C", bound=RunConfig, default=SkyRLTrainConfig)


@frozen(kw_only=True)
class Loaded(Generic[C]):
    """A tree and, beside it, dotted path -> origins of each value, winner last."""

    config: C
    origins: Origins
    warnings: tuple[Problem, ...] = ()
    """Warnings about old names that were followed."""
