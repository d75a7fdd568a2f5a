"""Layout of adapters: which parts of stored adapters make up the adapter of a Megatron layer. Nothing here requires
Megatron-core.

PEFT stores one adapter for each linear layer of transformers. Megatron-core joins some of these layers. The adapter of
a joined layer has either a factor A for each of them, or a common one (`Adapters.joined`), which is stored once for
each layer. If tensor parallelism cuts a matrix by outputs, each rank has its rows of B and all of A; if by inputs, its
columns of A and all of B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from skyrl.errors import ModelError
from skyrl.models.megatron.layout import Layout, RowBlock

COMMON = "adapter.a"
"""Megatron's name of a factor A that joined layers share."""


@frozen(kw_only=True)
class Adapters:
    """The adapters of a model."""

    modules: frozenset[str]
    """Stored names of the linear layers that have one."""

    rank: int

    scale: float
    """Factor of B A: alpha / rank."""

    joined: bool
    """Whether layers that Megatron-core joins share one factor A."""

    @classmethod
    def of(cls, model: nn.Module, *, joined: bool) -> Self | None:
        """The adapters in PEFT's layers of a transformers model; None if it has none."""
        layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
        if not layers:
            return None
        layer = next(iter(layers.values()))
        return cls(modules=frozenset(layers), rank=layer.r["default"], scale=layer.scaling["default"], joined=joined)


@frozen(kw_only=True)
class JoinedPart:
    """One of the stored layers that a linear layer of Megatron-core consists of."""

    name: str
    """The last part of its stored name, such as `q_proj`."""

    outputs: int
    """Number of its outputs on this rank."""

    is_adapted: bool


def parts_of(pieces: Sequence[RowBlock], adapters: Adapters) -> list[JoinedPart]:
    """The stored layers that the weight made of `pieces` consists of, in their order within a group of heads."""
    rows: dict[str, int] = {}
    for piece in pieces:
        rows[_module(piece)] = rows.get(_module(piece), 0) + len(piece.rows)
    return [
        JoinedPart(name=module.rpartition(".")[2], outputs=count, is_adapted=module in adapters.modules)
        for module, count in rows.items()
    ]


def with_adapters(layout: Layout, adapters: Adapters) -> Layout:
    """The layout of a model whose layers have adapters, with stored names as PEFT's layers have them. Raises
    `ModelError` for an adapter that no layer of Megatron-core can have.
    """
    result: dict[str, tuple[RowBlock, ...]] = {}
    for name, pieces in layout.items():
        result[name] = tuple(_renamed(piece, adapters) for piece in pieces)
        if name.endswith(".weight"):
            result |= {f"{name.removesuffix('weight')}{part}": blocks for part, blocks in _factors(pieces, adapters)}
    placed = {_module(piece) for name, pieces in layout.items() if name.startswith("decoder.") for piece in pieces}
    if misplaced := sorted(adapters.modules - placed):
        raise ModelError(
            f"strategy = megatron has adapters for the linear layers of attention and of the feed-forward part, and "
            f"none for {misplaced[0]}: choose others in model.lora.target_modules"
        )
    return result


def _factors(pieces: Sequence[RowBlock], adapters: Adapters) -> Iterator[tuple[str, tuple[RowBlock, ...]]]:
    """Names, relative to the linear layer, and blocks of the factors of its adapter."""
    own: dict[str, list[RowBlock]] = {}
    for piece in pieces:
        if _module(piece) in adapters.modules:
            own.setdefault(_module(piece), []).append(piece)
    first = {
        module: RowBlock(f"{module}.lora_A.default.weight", range(adapters.rank), blocks[0].columns)
        for module, blocks in own.items()
    }
    if adapters.joined and first:
        yield COMMON, tuple(first.values())
    for module, blocks in own.items():
        name = module.rpartition(".")[2]
        if not adapters.joined:
            yield f"adapter.a_{name}", (first[module],)
        yield f"adapter.b_{name}", tuple(_packed(f"{module}.lora_B.default.weight", blocks))


def _packed(weight: str, blocks: Sequence[RowBlock]) -> Iterator[RowBlock]:
    """The rows of `blocks` in another weight, one block after the other."""
    first = 0
    for block in blocks:
        yield RowBlock(weight, block.rows, None, first)
        first += len(block.rows)


def _module(piece: RowBlock) -> str:
    return piece.weight.rpartition(".")[0]


def _renamed(piece: RowBlock, adapters: Adapters) -> RowBlock:
    module, _, kind = piece.weight.rpartition(".")
    return evolve(piece, weight=f"{module}.base_layer.{kind}") if module in adapters.modules else piece


def new_adapters_in_common(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Newly drawn adapters in which joined layers share the A of the first of them. Raises `ModelError` for trained
    adapters with different A; while B is zero, replacing A does not change the adapter.
    """
    result = dict(tensors)
    for name, pieces in layout.items():
        if not name.endswith(COMMON):
            continue
        first, *others = [piece.weight for piece in pieces]
        for other in others:
            if not torch.equal(result[other], result[first]) and result[other.replace("lora_A", "lora_B")].any():
                raise ModelError(f"{different(first, other)}; or train without model.lora.path")
            result[other] = result[first]
    return result


def different(one: str, other: str) -> str:
    """A message about adapters of joined layers that were trained with separate factors A, with a remedy."""
    names = " and ".join(weight.partition(".lora_A")[0] for weight in (one, other))
    return (
        f"the adapters of {names} have separate factors A, but a shared one is configured: set "
        "megatron_config.lora_config.lora_type = canonical_lora"
    )
