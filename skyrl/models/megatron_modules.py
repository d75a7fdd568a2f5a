"""Modules that Megatron-core is given in the place of its own: the norm, and attention inside packed rows.

Megatron-core's own need Transformer Engine for sequence parallelism, for context parallelism and for packed rows; these
run wherever torch does. They follow Megatron-core's signatures and import nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from skyrl.models.routers import RoutedTokens
from skyrl.models.segment_attention import Segments, segment_attention
from skyrl.models.shared_rows import RowSharing

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@frozen(kw_only=True, eq=False)
class RowsOfTokens:
    """Facts about the rows of a micro-batch that every layer's attention needs. Megatron-core hands them on as its
    parameters of packed sequences.
    """

    tokens: int
    """Tokens of a row; what Megatron-core computes beyond them is padding."""

    rotation: tuple[Tensor, Tensor]
    """Cosines and sines of the rotary embedding, (1, tokens, D) each."""

    segments: Segments | None = None
    row_sharing: RowSharing | None = None

    routed: RoutedTokens | None = None
    """Tokens that this rank's routers meet, as Megatron-core numbers them. None: nobody asks."""

    row_weights: Tensor | None = None
    """(B,): share of each row in the loss. None: nothing is learned."""

    qkv_format: str = "sbhd"
    """Megatron-core's name of the order of dimensions: sequence, batch, heads, size."""


class MegatronNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) in float32, whose gradient Megatron-core sums over the ranks that have
    different tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        """`config` is Megatron-core's `TransformerConfig`."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron-core's mark

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        exact = hidden.float()
        scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class RowAttention(nn.Module):
    """Rotary embedding and causal attention inside the segments of packed rows, shared among ranks where context
    parallelism asks for it.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object
    ) -> None:
        """`config` is Megatron-core's `TransformerConfig`; the heads are those of this tensor-parallel rank."""
        super().__init__()
        self.layer_number, self._scaling = layer_number, softmax_scale
        self.num_key_value_groups = config.num_attention_heads // config.num_query_groups
        self.is_causal = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *_: object,
        packed_seq_params: RowsOfTokens,
        **__: object,
    ) -> Tensor:
        """Shapes: query (S, rows, heads, D), key and value (S, rows, kv_heads, D) -> (S, rows, heads x D)."""
        rows, length = packed_seq_params, query.shape[0]
        query, key, value = (each[: rows.tokens].permute(1, 2, 0, 3) for each in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *(each.to(query.dtype) for each in rows.rotation))
        mixed, _weights = segment_attention(
            self,
            query,
            key,
            value,
            None,
            segments=rows.segments,
            row_sharing=rows.row_sharing,
            scaling=self._scaling,
        )
        mixed = mixed.flatten(2)
        if length > rows.tokens:
            mixed = pad(mixed, (0, 0, 0, length - rows.tokens))
        return mixed.transpose(0, 1).contiguous()
