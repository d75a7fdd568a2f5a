"""Names of weights during transfer: those of the stored model, a tied tensor once only."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every entry of the state dict, in its order; a tied one once, under the first of its names.

    The tensors, of any shape, are the model's own, without their gradient history: writing into one changes the model.
    """
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():
        if name not in tied:
            yield name, tensor


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every name that is a second one for the same tensor, and the first: `lm_head.weight` of a tied head, usually."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    return tied
