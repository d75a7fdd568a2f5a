"""Low-rank adapters (LoRA, arXiv:2106.09685) for the parallel linear layers of Megatron-core.

Ranks that cut a matrix exchange the product between A and B, which is only as wide as the adapter's rank. Importing
this module requires Megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn.functional import linear

from skyrl.models.megatron.adapter_layout import Adapters, JoinedPart, parts_of
from skyrl.models.megatron.layout import Layout

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear

_CUT_BY_OUTPUTS = ("self_attention.linear_qkv", "mlp.linear_fc1")
_CUT_BY_INPUTS = ("self_attention.linear_proj", "mlp.linear_fc2")


class ParallelAdapter(nn.Module):
    """The update alpha / rank B A of one linear layer on one tensor-parallel rank. Its weights start uninitialized."""

    def __init__(
        self, base: Linear, parts: Sequence[JoinedPart], groups: int, adapters: Adapters, *, is_cut_by_inputs: bool
    ) -> None:
        """`base` is Megatron-core's linear layer, whose outputs are the outputs of `parts`, repeated for each of the
        `groups` of heads.
        """
        super().__init__()
        self._parts, self._groups, self._scale = tuple(parts), groups, adapters.scale
        self._is_cut_by_inputs, self._shares_tokens = is_cut_by_inputs, base.config.sequence_parallel
        adapted = [part for part in parts if part.is_adapted]
        self._first = ["a"] if adapters.joined else [f"a_{part.name}" for part in adapted]
        for name in self._first:
            self._add(name, (adapters.rank, base.weight.shape[1]), base.weight, is_whole=not is_cut_by_inputs)
        for part in adapted:
            self._add(f"b_{part.name}", (part.outputs, adapters.rank), base.weight, is_whole=is_cut_by_inputs)

    def _add(self, name: str, shape: tuple[int, int], like: Tensor, *, is_whole: bool) -> None:
        parameter = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
        if is_whole:  # on every rank, for its share of the tokens: Megatron-core sums such gradients over ranks
            parameter.sequence_parallel = self._shares_tokens  # type: ignore[attr-defined]  # Megatron-core's mark
        self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of the linear layer (S, rows, in) -> (S, rows, out), to be added to its outputs."""
        factors: list[Tensor] = [getattr(self, name) for name in self._first]
        narrow = self._exchanged(linear(x, factors[0] if len(factors) == 1 else torch.cat(factors))) * self._scale
        factors_of_part = iter(
            narrow.split(len(factors[0]), dim=-1) if len(factors) > 1 else [narrow] * len(self._parts)
        )
        outputs = [
            linear(next(factors_of_part), getattr(self, f"b_{part.name}"))
            if part.is_adapted
            else narrow.new_zeros((*narrow.shape[:-1], part.outputs))
            for part in self._parts
        ]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([every.unflatten(-1, (self._groups, -1)) for every in outputs], dim=-1).flatten(-2)

    def _exchanged(self, narrow: Tensor) -> Tensor:
        """The input of B on this rank, from the parts of A x on all ranks."""
        if self._is_cut_by_inputs and self._shares_tokens:
            exchange = tensor_parallel.reduce_scatter_to_sequence_parallel_region
        elif self._is_cut_by_inputs:
            exchange = tensor_parallel.reduce_from_tensor_model_parallel_region
        elif self._shares_tokens:
            exchange = tensor_parallel.gather_from_sequence_parallel_region
        else:
            exchange = tensor_parallel.copy_to_tensor_model_parallel_region
        exchanged: Tensor = exchange(narrow)
        return exchanged


def attach_adapters(gpt: GPTModel, layout: Layout, adapters: Adapters) -> None:
    """Add adapters to the linear layers of this stage; `layout` is the layout of the model without adapters."""
    for layer in gpt.decoder.layers:
        for name in (*_CUT_BY_OUTPUTS, *_CUT_BY_INPUTS):
            pieces = layout.get(f"decoder.layers.{layer.layer_number - 1}.{name}.weight", ())
            parts = parts_of(pieces, adapters)
            if any(part.is_adapted for part in parts):
                base = layer.get_submodule(name)
                base.adapter = ParallelAdapter(
                    base, parts, len(pieces) // len(parts), adapters, is_cut_by_inputs=name in _CUT_BY_INPUTS
                )
                base.register_forward_hook(_added)


def _added(
    module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    own, bias = outputs
    return own + module.get_submodule("adapter")(inputs[0]), bias


def let_gradients_pass(embedding: nn.Module) -> None:
    """Make the output of a frozen embedding require a gradient. Megatron-core recomputes a layer only if its input
    requires one.
    """
    embedding.register_forward_hook(
        lambda module, inputs, hidden: hidden.requires_grad_() if torch.is_grad_enabled() else hidden
    )
