"""Stored weights become Megatron's parameters and come back, whole and each number once, however ranks cut them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from skyrl.errors import ModelError
from skyrl.models.files.naming import named_weights
from skyrl.models.megatron.layout import (
    ARCHITECTURES,
    DecoderSizes,
    Layout,
    RowBlock,
    expert_layout_of,
    fill,
    layout_of,
    local_part,
    matrix_of,
    put,
)
from skyrl.planning.model_shape import CONVERTED
from tests.inference.nano import nano_model

REAL: dict[str, Any] = {
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
        tie_word_embeddings=False,
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=False,
    ),
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151_936,
        tie_word_embeddings=False,
        head_dim=128,
    ),
    "Mixtral-8x7B": MixtralConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        vocab_size=32_000,
        tie_word_embeddings=False,
    ),
}


def rows_of(layout: Layout, weights: Mapping[str, Tensor], name: str, padded: int) -> Tensor:
    """The parameter of one rank, out of the stored weights."""
    pieces = layout[name]
    rows = padded if "embedding" in name or "output_layer" in name else sum(len(piece.rows) for piece in pieces)
    first = cut(weights[pieces[0].weight], pieces[0])
    local = torch.full((rows, *first.shape[1:]), torch.nan)
    fill(local, pieces, lambda piece: cut(weights[piece.weight], piece))
    return local


def cut(weight: Tensor, piece: RowBlock) -> Tensor:
    weight = matrix_of(weight)
    rows = weight[piece.rows.start : piece.rows.stop]
    return rows if piece.columns is None else rows[:, piece.columns.start : piece.columns.stop]


def assert_weights_come_back(weights: Mapping[str, Tensor], layouts: Sequence[Layout], padded: int) -> None:
    """What ranks of these layouts cut out of stored weights makes the same weights; a rank has `padded` tokens."""
    back = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for layout in layouts:
        for name, pieces in layout.items():
            local = rows_of(layout, weights, name, padded)
            assert local.isfinite().all(), name
            for weight in {piece.weight for piece in pieces}:
                put(back[weight], local_part(local, pieces, weight), pieces, weight)
    assert all(torch.equal(weight, back[name]) for name, weight in weights.items())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "qwen3", "llama", "qwen3_moe", "mixtral"])
def test_weights_come_back_as_they_were_however_many_ranks_cut_them(kind: str, parts: int) -> None:
    model = nano_model(kind)
    weights = {name: weight + torch.rand_like(weight) for name, weight in named_weights(model)}  # no norm is 1
    sizes = DecoderSizes.of(model.config)
    layouts = [layout_of(sizes, parts=parts, part=part) for part in range(parts)]
    layouts += [expert_layout_of(sizes, groups=2, parts=parts, rank=rank) for rank in range(2 * parts)]
    assert_weights_come_back(weights, layouts, sizes.padded_vocabulary(parts) // parts)


def test_a_group_of_heads_lies_together_queries_first() -> None:
    sizes = DecoderSizes.of(nano_model("qwen2").config)  # 4 heads of 8 in 2 groups
    pieces = layout_of(sizes, parts=2, part=1)["decoder.layers.1.self_attention.linear_qkv.bias"]
    stored = "model.layers.1.self_attn."
    assert pieces == (
        RowBlock(f"{stored}q_proj.bias", range(16, 32), None, 0),
        RowBlock(f"{stored}k_proj.bias", range(8, 16), None, 16),
        RowBlock(f"{stored}v_proj.bias", range(8, 16), None, 24),
    )


def test_a_vocabulary_that_ranks_cannot_share_equally_is_padded_at_its_end() -> None:
    sizes = DecoderSizes.of(nano_model("qwen2").config)  # 258 tokens
    assert sizes.padded_vocabulary(4) == 260
    [piece] = layout_of(sizes, parts=4, part=3)["output_layer.weight"]
    assert piece == RowBlock("lm_head.weight", range(195, 258))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_number_of_a_real_model_has_one_place(name: str, parts: int) -> None:
    config = REAL[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stored = dict(named_weights(model))
    sizes = DecoderSizes.of(config)
    placed: Counter[str] = Counter()
    for part in range(parts):
        layout = dict(layout_of(sizes, parts=parts, part=part))
        if sizes.tied:
            del layout["output_layer.weight"]  # a copy of the embeddings
        for rank in (part, parts + part):  # of two groups of ranks with different experts
            layout |= {
                f"{rank} {name}": pieces
                for name, pieces in expert_layout_of(sizes, groups=2, parts=parts, rank=rank).items()
            }
        for piece in (piece for pieces in layout.values() for piece in pieces):
            matrix = matrix_of(stored[piece.weight])
            width = 1 if matrix.dim() == 1 else len(piece.columns) if piece.columns else matrix.shape[1]
            is_cut = len(piece.rows) * width < matrix.numel() or parts == 1
            placed[piece.weight] += len(piece.rows) * width if is_cut or part == 0 else 0
    assert placed == {name: weight.numel() for name, weight in stored.items()}


def test_plans_know_the_kinds_that_have_a_converter() -> None:
    assert set(CONVERTED) == set(ARCHITECTURES)


def test_a_model_without_a_converter_is_refused_by_its_name() -> None:
    with pytest.raises(
        ModelError, match="converter between mistral and Megatron: use one of llama, qwen2, qwen3, mixtral, qwen3_moe"
    ):
        DecoderSizes.of(MistralConfig())
