"""New weights for a model in place: everything is checked before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from skyrl.errors import WeightSyncError


def replace_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies a complete set of weights into `model`, cast to its types.

    Names are those of `model.state_dict()`. A tied tensor may come under any of its names, or under several if they
    agree. Raises `WeightSyncError`, with the old weights untouched, when a name is missing, unknown or there twice, or
    a shape differs.
    """
    held: dict[str, Tensor] = model.state_dict(keep_vars=True)
    received: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in received:
            raise WeightSyncError(f"{name} was sent twice")
        received[name] = tensor
    problems = [*_unusable(held, received), *_incomplete(held, received)]
    if problems:
        raise WeightSyncError(f"the weights sent do not fit, the old ones are kept: {_few(problems)}")
    with torch.no_grad():
        for name, tensor in received.items():
            held[name].copy_(tensor)


def _unusable(held: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> Iterable[str]:
    for name, tensor in received.items():
        if name not in held:
            yield f"{name} is not a weight of this model"
        elif tensor.shape != held[name].shape:
            yield f"{name} has shape {tuple(tensor.shape)}, this model's has {tuple(held[name].shape)}"


def _incomplete(held: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> Iterable[str]:
    """Weights sent under none of their names, and tied ones sent under several with different values."""
    tied: dict[int, list[str]] = {}
    for name, tensor in held.items():
        tied.setdefault(id(tensor), []).append(name)
    for names in tied.values():
        sent = [name for name in names if name in received]
        if not sent:
            yield f"{names[0]} is missing"
        for other in sent[1:]:
            if not torch.equal(received[sent[0]], received[other].to(received[sent[0]])):
                yield f"{sent[0]} and {other} are tied in this model and were sent with different values"


def _few(problems: list[str]) -> str:
    more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
    return "; ".join(problems[:5] + more)
