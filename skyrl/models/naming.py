"""Under which names weights travel: those of the stored model, a tensor that is used twice only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and parameter of every weight, in the order of the module; tied ones once, under their first name."""
    yield from model.named_parameters(remove_duplicate=True)


def tied_names(model: Any) -> frozenset[str]:
    """Names of parameters that are another one under a second name, such as `lm_head.weight` of a tied head."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=True)}
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own)
