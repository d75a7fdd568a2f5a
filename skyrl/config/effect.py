"""What it means that a field has an effect under a condition only."""

from collections.abc import Callable
from typing import Any

from attrs import frozen


@frozen
class Effect:
    """One path, or every path inside a table, and when it acts."""

    path: str
    when: str
    acts: Callable[[Any], bool]
