"""Low-rank updates of linear layers that are computed next to the layer and never merged into its weight.

    y = x W^T + b + alpha / rank (x A^T) B^T          LoRA, arXiv:2106.09685, eq. 3

An update is the attribute `low_rank` of its layer. Layers that transformers computes add it in a forward hook;
`skyrl.inference.torch.projections`, which prepares layers' weights itself, reads the attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen
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


def set_updates(model: nn.Module, updates: Mapping[str, LowRank]) -> None:
    """Set the update of each named linear layer, on the layer's device and in its type, and remove all others.

    An update of the size of the layer's last one is copied to its memory, where CUDA graphs read it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            update, weight = updates.get(name), module.weight
            if update is not None and not hasattr(module, "low_rank"):
                module.register_forward_hook(_added)
            if update is not None or hasattr(module, "low_rank"):
                vars(module)["low_rank"] = update and _reuse_memory(_moved(update, weight), of_layers([module])[0])


def of_layers(layers: Sequence[nn.Linear]) -> list[LowRank | None]:
    """The update of each layer, on the current device of the layer's weight; None for a layer without one."""
    result: list[LowRank | None] = [getattr(layer, "low_rank", None) for layer in layers]
    return [item and _moved(item, layer.weight) for item, layer in zip(result, layers, strict=True)]


def _moved(update: LowRank, weight: Tensor) -> LowRank:
    return LowRank(update.a.to(weight), update.b.to(weight))


def _reuse_memory(update: LowRank, last: LowRank | None) -> LowRank:
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


Joined = tuple[Tensor, Tensor]
"""Factors A (rank, in) and B (out, rank) of layers that share their input, whose outputs are concatenated."""


@frozen(eq=False, kw_only=True)
class Updates:
    """One adapter: the updates of all layers that it changes."""

    number: int
    """Unlike that of any other adapter of the model, earlier ones included."""

    layers: Mapping[nn.Linear, LowRank]
    _joined: dict[tuple[nn.Linear, ...], Joined | None] = field(factory=dict, init=False)

    def joined(self, layers: tuple[nn.Linear, ...]) -> Joined | None:
        """Factors of these layers, which share their input; None if the adapter changes none of them."""
        if layers not in self._joined:
            self._joined[layers] = self._joined_update(layers)
        return self._joined[layers]

    def _joined_update(self, layers: tuple[nn.Linear, ...]) -> Joined | None:
        changed = [(index, self.layers[layer]) for index, layer in enumerate(layers) if layer in self.layers]
        if len(layers) == 1 or not changed:
            return next(((update.a, update.b) for _, update in changed), None)
        rows = torch.tensor([0, *(layer.out_features for layer in layers)]).cumsum(0).tolist()
        a = torch.cat([update.a for _, update in changed])
        b, column = a.new_zeros(rows[-1], len(a)), 0
        for index, update in changed:
            rank = len(update.a)
            b[rows[index] : rows[index + 1], column : column + rank] = update.b
            column += rank
        return a, b


@frozen(eq=False, kw_only=True)
class Mix:
    """The adapters of the rows of a batch."""

    adapters: tuple[Updates, ...]
    """Different ones, in the order of their numbers."""

    owners: Tensor | None
    """(R,) int64, the place of each row's adapter in `adapters`, -1 for none; None if all rows have the same adapter.
    May be longer than the batch."""

    _factors: dict[tuple[nn.Linear, ...], tuple[Tensor, Tensor, Tensor] | None] = field(factory=dict, init=False)

    @classmethod
    def of(cls, rows: Sequence[Updates | None], last: Mix | None, device: torch.device, size: int) -> Mix:
        """The mix of rows of which some have an adapter, padded to `size`. Takes factors from `last`."""
        adapters = tuple(sorted({row for row in rows if row is not None}, key=lambda adapter: adapter.number))
        owners = None
        if len(adapters) > 1 or None in rows:
            indices: dict[Updates | None, int] = {adapter: index for index, adapter in enumerate(adapters)}
            filled = [*rows, *[None] * (size - len(rows))]
            owners = torch.tensor([indices.get(row, -1) for row in filled], device=device)
        mix = cls(adapters=adapters, owners=owners)
        if last is not None and last.adapters == adapters:
            mix._factors.update(last._factors)
        return mix

    def plus(self, layers: tuple[nn.Linear, ...], x: Tensor, y: Tensor) -> Tensor:
        """y plus the update of x's rows by the adapter of each: (R, ..., in), (R, ..., out) -> (R, ..., out).

        The factors of all adapters are concatenated. Of x A^T, each row keeps the columns of its own adapter, so that
        two products serve any number of adapters.
        """
        if layers not in self._factors:
            self._factors[layers] = self._concatenated(layers)
        factors = self._factors[layers]
        if factors is None:
            return y
        a, b, columns = factors
        inner = nn.functional.linear(x, a)
        if self.owners is not None:
            owners = self.owners[: len(x)].view(-1, *[1] * (x.dim() - 1))
            inner = inner.masked_fill(owners != columns, 0.0)
        return y + nn.functional.linear(inner, b)

    def _concatenated(self, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Both factors, and the place of the adapter to which each of their columns belongs."""
        parts = [(index, adapter.joined(layers)) for index, adapter in enumerate(self.adapters)]
        present = [(index, *joined) for index, joined in parts if joined is not None]
        if not present:
            return None
        device = present[0][1].device
        columns = torch.tensor([index for index, a, _ in present for _ in range(len(a))], device=device)
        if len(present) == 1:
            return present[0][1], present[0][2], columns
        return torch.cat([a for _, a, _ in present]), torch.cat([b for _, _, b in present], dim=1), columns


class SideBySide:
    """Where the layers of a model find the adapters of the current batch; only one thread at a time may compute."""

    def __init__(self) -> None:
        self.mix: Mix | None = None

    def hook(self, model: nn.Module) -> None:
        """Makes every linear layer of a model that transformers computes add the updates of the current batch."""
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._added)

    def _added(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(module, nn.Linear)
        return output if self.mix is None else self.mix.plus((module,), inputs[0], output)
