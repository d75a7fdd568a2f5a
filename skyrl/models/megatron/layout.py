"""Names and layouts of a decoder's weights: which rows of which stored weight make up a Megatron parameter.

Megatron-core joins query, key and value of each group of heads into one matrix, and gate and up projection into
another; its tensor parallelism cuts the joined matrices and pads the vocabulary. The experts that a rank has of a layer
are stacked one below the other. Both directions of the conversion follow from one table of `RowBlock`s, one tensor at a
time. Nothing here requires Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch
from attrs import frozen
from torch import Tensor
from transformers import PretrainedConfig

from skyrl.errors import ModelError

EMBEDDINGS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron's names of the matrices with a row for each token."""

_STORED_EMBEDDINGS, _STORED_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@frozen(kw_only=True)
class Mixture:
    """Sizes of the mixtures of experts in a decoder."""

    experts: int
    """Number of experts of a layer."""

    per_token: int
    """Number of experts that compute each token."""

    inner: int
    """Features inside an expert."""

    layers: frozenset[int]
    """Layers, numbered from 0, that have experts instead of one feed-forward network."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self | None:
        """Sizes from a transformers configuration; None for a model without experts. In Qwen's models,
        `decoder_sparse_step` and `mlp_only_layers` select the layers with experts; in others all layers have them.
        """
        if not getattr(config, "num_local_experts", 0):
            return None
        step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", ())
        return cls(
            experts=config.num_local_experts,
            per_token=config.num_experts_per_tok,
            inner=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            layers=frozenset(n for n in range(config.num_hidden_layers) if (n + 1) % step == 0 and n not in dense),
        )


@frozen(kw_only=True)
class DecoderSizes:
    """Sizes of a decoder that determine the layout of its weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    """Number of key and value heads."""

    head_size: int
    vocabulary: int

    tied: bool
    """Whether the output head is the matrix of the embeddings."""

    attention_bias: bool
    """Whether query, key and value have a bias."""

    head_norms: bool
    """Whether queries and keys are normalized per head."""

    mixture: Mixture | None = None
    """None: every layer has one feed-forward network."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Sizes from a transformers configuration. Raises `ModelError` for an architecture without a converter."""
        kind = config.model_type
        if kind not in ARCHITECTURES:
            raise ModelError(
                f"there is no converter between {kind} and Megatron: use one of {', '.join(ARCHITECTURES)}, or "
                "another strategy"
            )
        attention_bias, head_norms = ARCHITECTURES[kind]
        return cls(
            mixture=Mixture.of(config),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            attention_bias=attention_bias,
            head_norms=head_norms,
        )

    def padded_vocabulary(self, parts: int) -> int:
        """Rows of the embeddings with padding: the least number that `parts` ranks can share equally."""
        return -(-self.vocabulary // parts) * parts


ARCHITECTURES: Mapping[str, tuple[bool, bool]] = {
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "mixtral": (False, False),
    "qwen3_moe": (False, True),
}
"""`model_type` of transformers -> whether attention has a bias on query, key and value, and whether it normalizes
heads."""


@frozen
class RowBlock:
    """Rows of a Megatron parameter that are rows of a stored weight. A vector counts as a column."""

    weight: str
    """Name of the stored weight."""

    rows: range
    """Its rows. If it holds a matrix for each expert, rows are counted over all of them, one below the other."""

    columns: range | None = None
    """Its columns; None: all columns."""

    first: int = 0
    """First row of the block in the Megatron parameter."""


Layout = Mapping[str, tuple[RowBlock, ...]]
"""Megatron parameter, layers counted from 0 over all pipeline stages -> its pieces, in the order of its rows."""


def layout_of(sizes: DecoderSizes, *, parts: int = 1, part: int = 0, value_head: str | None = None) -> Layout:
    """Blocks of every parameter, except those of experts, on one of the `parts` ranks that cut matrices among them.

    `value_head` names the weight of a critic's head, which replaces the output head. A tied output head, of which the
    last pipeline stage holds a copy, has the layout of the embeddings.
    """
    tokens = sizes.padded_vocabulary(parts) // parts
    own = range(part * tokens, min((part + 1) * tokens, sizes.vocabulary))
    result: dict[str, tuple[RowBlock, ...]] = {EMBEDDINGS: (RowBlock(_STORED_EMBEDDINGS, own),)}
    for layer in range(sizes.layers):
        result |= {f"decoder.layers.{layer}.{name}": pieces for name, pieces in _layer(sizes, layer, parts, part)}
    result["decoder.final_layernorm.weight"] = (RowBlock("model.norm.weight", range(sizes.hidden)),)
    if value_head is not None:
        result["value_head.weight"] = (RowBlock(value_head, range(1)),)
    else:
        result[HEAD] = (RowBlock(_STORED_EMBEDDINGS if sizes.tied else _STORED_HEAD, own),)
    return result


def _layer(sizes: DecoderSizes, layer: int, parts: int, part: int) -> Iterator[tuple[str, tuple[RowBlock, ...]]]:
    stored = f"model.layers.{layer}."
    hidden, head = range(sizes.hidden), range(sizes.head_size)
    yield "input_layernorm.weight", (RowBlock(f"{stored}input_layernorm.weight", hidden),)
    yield "pre_mlp_layernorm.weight", (RowBlock(f"{stored}post_attention_layernorm.weight", hidden),)
    for kind in ("weight", "bias") if sizes.attention_bias else ("weight",):
        yield f"self_attention.linear_qkv.{kind}", tuple(_joined_heads(sizes, stored, kind, parts, part))
    if sizes.head_norms:
        for name in ("q", "k"):
            yield f"self_attention.{name}_layernorm.weight", (RowBlock(f"{stored}self_attn.{name}_norm.weight", head),)
    mixed = _share(sizes.heads * sizes.head_size, parts, part)
    yield "self_attention.linear_proj.weight", (RowBlock(f"{stored}self_attn.o_proj.weight", hidden, mixed),)
    if sizes.mixture is not None and layer in sizes.mixture.layers:
        yield "mlp.router.weight", (RowBlock(f"{stored}mlp.gate.weight", range(sizes.mixture.experts)),)
        return
    inner = _share(sizes.intermediate, parts, part)
    gate = RowBlock(f"{stored}mlp.gate_proj.weight", inner)
    yield "mlp.linear_fc1.weight", (gate, RowBlock(f"{stored}mlp.up_proj.weight", inner, None, len(inner)))
    yield "mlp.linear_fc2.weight", (RowBlock(f"{stored}mlp.down_proj.weight", hidden, inner),)


def expert_layout_of(sizes: DecoderSizes, *, groups: int, parts: int, rank: int) -> Layout:
    """Blocks of the parameters of experts on one of the ranks that together hold all experts: `groups` of ranks with
    different experts, each of `parts` ranks that cut every matrix. Empty for a model without experts.
    """
    result: dict[str, tuple[RowBlock, ...]] = {}
    for layer in () if sizes.mixture is None else sorted(sizes.mixture.layers):
        assert sizes.mixture is not None
        own = _share(sizes.mixture.experts, groups, rank // parts)
        inner = _share(sizes.mixture.inner, parts, rank % parts)
        stored, name = f"model.layers.{layer}.mlp.experts.", f"decoder.layers.{layer}.mlp.experts."
        gate_up: list[RowBlock] = []
        for number in range(2 * own.start, 2 * own.stop):  # gate and up of each expert
            rows = _moved(inner, number * sizes.mixture.inner)
            gate_up.append(RowBlock(f"{stored}gate_up_proj", rows, None, len(gate_up) * len(inner)))
        down: list[RowBlock] = []
        for expert in own:
            rows = _moved(range(sizes.hidden), expert * sizes.hidden)
            down.append(RowBlock(f"{stored}down_proj", rows, inner, len(down) * sizes.hidden))
        result |= {f"{name}gate_up": tuple(gate_up), f"{name}down": tuple(down)}
    return result


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def _joined_heads(sizes: DecoderSizes, stored: str, kind: str, parts: int, part: int) -> Iterator[RowBlock]:
    """Queries, key and value of each group of heads, one group after the other."""
    queries, size, first = sizes.heads // sizes.groups, sizes.head_size, 0
    for group in _share(sizes.groups, parts, part):
        for name, heads in (("q", queries), ("k", 1), ("v", 1)):
            rows = range(group * heads * size, (group + 1) * heads * size)
            yield RowBlock(f"{stored}self_attn.{name}_proj.{kind}", rows, None, first)
            first += len(rows)


def _share(size: int, parts: int, part: int) -> range:
    return range(size * part // parts, size * (part + 1) // parts)


def block_of(local: Tensor, piece: RowBlock) -> Tensor:
    """The rows of a Megatron parameter (rows, ...) that belong to the piece; a view."""
    return local[piece.first : piece.first + len(piece.rows)]


def fill(local: Tensor, pieces: Sequence[RowBlock], read: Callable[[RowBlock], Tensor]) -> None:
    """Fill a Megatron parameter (rows, ...) with the blocks that `read` returns; padding rows are 0."""
    local.zero_()
    for piece in pieces:
        target = block_of(local, piece)
        target.copy_(read(piece).view(target.shape))


def local_part(local: Tensor, pieces: Sequence[RowBlock], weight: str) -> Tensor:
    """(rows, ...): the part of one stored weight in a Megatron parameter, with its pieces one after the other."""
    blocks = [block_of(local, piece) for piece in pieces if piece.weight == weight]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def matrix_of(weight: Tensor) -> Tensor:
    """A stored weight as a view in the form that `RowBlock`s refer to: the matrices of all experts (E, rows, columns)
    become one matrix (E x rows, columns).
    """
    return weight.flatten(0, 1) if weight.dim() == 3 else weight


def put(full: Tensor, part: Tensor, pieces: Sequence[RowBlock], weight: str) -> None:
    """Write `part`, returned by `local_part` on a rank whose parameter has these `pieces`, into the whole weight."""
    full, first = matrix_of(full), 0
    for piece in (item for item in pieces if item.weight == weight):
        rows = part[first : first + len(piece.rows)]
        first += len(piece.rows)
        target = full[piece.rows.start : piece.rows.stop]
        if piece.columns is not None:
            target = target[:, piece.columns.start : piece.columns.stop]
        target.copy_(rows)
