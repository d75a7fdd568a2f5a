"""Replacements for modules of Megatron-core: the norm, and attention inside packed rows.

Megatron-core's modules need Transformer Engine for sequence parallelism, context parallelism and packed rows; these run
wherever torch does. They follow Megatron-core's signatures but do not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from skyrl.models.attention.segment_attention import Segments, segment_attention
from skyrl.models.attention.shared_rows import RowSharing
from skyrl.models.routers import RoutedTokens

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@frozen(kw_only=True, eq=False)
class RowsOfTokens:
    """Facts about the rows of a micro-batch that every layer's attention needs. Megatron-core passes them through its
    layers as the parameters of packed sequences.
    """

    tokens: int
    """Tokens of a row; everything that Megatron-core computes beyond them is padding."""

    rotation: tuple[Tensor, Tensor]
    """Cosines and sines of the rotary embedding, (1, tokens, D) each."""

    segments: Segments | None = None
    row_sharing: RowSharing | None = None

    routed: RoutedTokens | None = None
    """Tokens that this rank's routers see, in Megatron-core's numbering. None: routers are neither measured nor
    replayed."""

    row_weights: Tensor | None = None
    """(B,): share of each row in the loss. None: the pass is not for training."""

    qkv_format: str = "sbhd"
    """Megatron-core's name of the order of dimensions: sequence, batch, heads, size."""


class MegatronNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) in float32. Megatron-core sums its gradient over ranks with different
    tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        """`config` is Megatron-core's `TransformerConfig`."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron-core's mark

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalized hidden states: (..., H) -> (..., H)."""
        exact = hidden.float()
        scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class RowAttention(nn.Module):
    """Rotary embedding and causal attention inside the segments of packed rows, shared among ranks under context
    parallelism.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object
    ) -> None:
        """`config` is Megatron-core's `TransformerConfig`; the module has the heads of this tensor-parallel rank."""
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
        query, key, value = (item[: rows.tokens].permute(1, 2, 0, 3) for item in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *(entry.to(query.dtype) for entry in rows.rotation))
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
