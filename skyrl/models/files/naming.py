"""Names of weights during transfer: the names of the stored model, with each tied tensor only once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every entry of the state dict, in its order; tied entries once, under the first name.

    The tensors, of any shape, are the model's own, without their gradient history: writing into one changes the model.
    """
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():
        if name not in tied:
            yield name, tensor


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every second name of a tied tensor -> its first name; the second is usually `lm_head.weight`."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    return tied
