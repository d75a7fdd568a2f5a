"""Values that follow from others: the rules of `resolve`, sizes, layouts of models, capabilities of engines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from skyrl.tree.rules import Rule

if TYPE_CHECKING:
    from skyrl.config.foundation.entry import RunConfig


def rules_in(module: str) -> tuple[Rule[RunConfig], ...]:
    """The derivation rules that a module has defined so far, in order."""
    return tuple(value for value in vars(sys.modules[module]).values() if isinstance(value, Rule))
