"""Replaces a model's weights in place: everything is checked before anything is copied, and read back afterwards."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.incoming_weights import IncomingWeights, WeightInfo, summarize_problems


def received_weights(model: nn.Module, incoming: IncomingWeights) -> dict[str, Tensor]:
    """A complete set of weights for `model`, which is not changed, by the names of `model.state_dict()`.

    A tied tensor may come under any of its names, or under several if they agree. Raises `WeightSyncError` if a name is
    missing, unknown or sent twice, a shape differs, or a tensor is lost or changed in transit.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    tied = list(names.values())  # all names of each tensor
    _refuse([*_unusable(state, incoming.weights), *_missing(tied, {info.name for info in incoming.weights})])
    with incoming.open() as weights:
        received = dict(weights)
    _refuse([*_missing(tied, received), *_contradictions(tied, received)])
    return received


def replace_weights(model: nn.Module, received: Mapping[str, Tensor]) -> None:
    """Copies `received_weights` into `model`, cast to its types. Raises `WeightSyncError` if the parameters are then
    not those that arrived.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in received.items():
            state[name].copy_(tensor)
        refuse_not_loaded({name: (state[name], tensor) for name, tensor in received.items()})


def refuse_beside_adapters(names: Collection[str]) -> None:
    """Raises `WeightSyncError` if an engine has adapters: they fit only the weights on which they were trained."""
    if names:
        raise WeightSyncError(
            f"an engine with adapters ({', '.join(names)}) takes no new weights: the adapters fit only the current ones"
        )


def refuse_not_loaded(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raises `WeightSyncError` unless each first tensor, as a model holds it, is the second of the same shape, as it
    arrived, rounded to the model's type. The host waits for a GPU once.
    """
    flags = [
        (held != arrived.to(held)).any() if held.is_cuda else torch.tensor(not torch.equal(held, arrived.to(held)))
        for held, arrived in pairs.values()
    ]
    wrong = [name for name, differs in zip(pairs, torch.stack(flags).tolist(), strict=True) if differs] if flags else []
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise WeightSyncError(f"{wrong[0]}{more} arrived and is not what the model holds after it was loaded")


def _unusable(state: Mapping[str, Tensor], announced: Iterable[WeightInfo]) -> Iterable[str]:
    seen: set[str] = set()
    for info in announced:
        if info.name in seen:
            yield f"{info.name} is sent twice"
        elif info.name not in state:
            yield f"{info.name} is not a weight of this model"
        elif info.shape != tuple(state[info.name].shape):
            yield f"{info.name} has shape {info.shape}, this model's has {tuple(state[info.name].shape)}"
        seen.add(info.name)


def _missing(tied: Iterable[Sequence[str]], sent: Container[str]) -> Iterable[str]:
    return (f"{names[0]} is missing" for names in tied if not any(name in sent for name in names))


def _contradictions(tied: Iterable[Sequence[str]], received: Mapping[str, Tensor]) -> Iterable[str]:
    """Problems of tied weights that arrived under several names, with different values."""
    for names in tied:
        first, *others = (name for name in names if name in received)
        for other in others:
            if not torch.equal(received[first], received[other].to(received[first])):
                yield f"{first} and {other} are tied in this model and were sent with different values"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise WeightSyncError(f"the weights sent do not fit, the old ones are kept: {summarize_problems(problems)}")
