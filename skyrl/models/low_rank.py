"""Low-rank updates of linear layers that are computed beside the layer, and never merged into its weight.

    y = x W^T + b + alpha / rank (x A^T) B^T          LoRA, arXiv:2106.09685, eq. 3

An update hangs on its layer as the attribute `low_rank`. Layers that transformers computes add it in a forward hook;
`skyrl.inference.projections` reads it where it prepares a layer's weight for itself.
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
    """(rank, in)"""

    b: Tensor
    """(out, rank), with the factor alpha / rank in it."""

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return product


def attach(model: nn.Module, updates: Mapping[str, LowRank]) -> None:
    """Gives each named linear layer its update, on the layer's device and in its type, and takes all others away."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            update, weight = updates.get(name), module.weight
            if update is not None and not hasattr(module, "low_rank"):
                module.register_forward_hook(_added)
            if update is not None or hasattr(module, "low_rank"):
                vars(module)["low_rank"] = update and _moved(update, weight)


def of_layers(layers: Sequence[nn.Linear]) -> list[LowRank | None]:
    """The update of each layer, where its weight is now."""
    found: list[LowRank | None] = [getattr(layer, "low_rank", None) for layer in layers]
    return [each and _moved(each, layer.weight) for each, layer in zip(found, layers, strict=True)]


def _moved(update: LowRank, weight: Tensor) -> LowRank:
    return LowRank(update.a.to(weight), update.b.to(weight))


def _added(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear)
    (update,) = of_layers([module])
    return output if update is None else output + update(inputs[0])


def whole(updates: Sequence[LowRank | None], layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """Updates of layers that share their input, one after the other: (T, in) -> (T, sum of out)."""
    parts = [
        x.new_zeros((*x.shape[:-1], layer.out_features)) if update is None else update(x)
        for update, layer in zip(updates, layers, strict=True)
    ]
    return torch.cat(parts, dim=-1)
