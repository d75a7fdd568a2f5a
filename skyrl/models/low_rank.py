"""Low-rank updates of linear layers that are computed next to the layer and never merged into its weight.

    y = x W^T + b + alpha / rank (x A^T) B^T          LoRA, arXiv:2106.09685, eq. 3

An update is the attribute `low_rank` of its layer. Layers that transformers computes add it in a forward hook;
`skyrl.inference.torch.projections`, which prepares layers' weights itself, reads the attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn


@frozen(eq=False)
class LowRank:
    """One layer's update: x (..., in) -> (..., out)."""

    a: Tensor
    """The factor A, (rank, in)."""

    b: Tensor
    """The factor B, (out, rank), multiplied by alpha / rank."""

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return product


def attach(model: nn.Module, updates: Mapping[str, LowRank]) -> None:
    """Sets the update of each named linear layer, on the layer's device and in its type, and removes all others.

    An update of the size of the layer's last one is copied to its memory, where CUDA graphs read it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            update, weight = updates.get(name), module.weight
            if update is not None and not hasattr(module, "low_rank"):
                module.register_forward_hook(_added)
            if update is not None or hasattr(module, "low_rank"):
                vars(module)["low_rank"] = update and _in_place(_moved(update, weight), of_layers([module])[0])


def of_layers(layers: Sequence[nn.Linear]) -> list[LowRank | None]:
    """The update of each layer, on the current device of the layer's weight; None for a layer without one."""
    result: list[LowRank | None] = [getattr(layer, "low_rank", None) for layer in layers]
    return [each and _moved(each, layer.weight) for each, layer in zip(result, layers, strict=True)]


def _moved(update: LowRank, weight: Tensor) -> LowRank:
    return LowRank(update.a.to(weight), update.b.to(weight))


def _in_place(update: LowRank, last: LowRank | None) -> LowRank:
    """`update` in the memory of `last`, if sizes, device and type are equal, else in memory that nobody else holds."""
    if last is None or (last.a.shape, last.b.shape) != (update.a.shape, update.b.shape):
        return LowRank(update.a.clone(), update.b.clone())
    last.a.copy_(update.a)
    last.b.copy_(update.b)
    return last


def _added(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear)
    (update,) = of_layers([module])
    return output if update is None else output + update(inputs[0])


def whole(updates: Sequence[LowRank | None], layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """The concatenated updates of layers that share their input: (T, in) -> (T, sum of out)."""
    parts = [
        x.new_zeros((*x.shape[:-1], layer.out_features)) if update is None else update(x)
        for update, layer in zip(updates, layers, strict=True)
    ]
    return torch.cat(parts, dim=-1)
