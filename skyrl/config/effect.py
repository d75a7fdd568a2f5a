"""What it means that a field has an effect under a condition only."""

from collections.abc import Callable

from attrs import frozen

from skyrl.config.root import SkyRLTrainConfig


@frozen
class Effect:
    """One path, or every path inside a table, and when it acts."""

    path: str
    when: str
    acts: Callable[[SkyRLTrainConfig], bool]
