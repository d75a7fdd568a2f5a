"""Factors of stored adapters become those of Megatron's layers and come back, however ranks cut them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ModelError
from skyrl.models.files.naming import named_weights
from skyrl.models.lora import with_adapter
from skyrl.models.megatron.adapter_layout import Adapters, new_adapters_in_common, with_adapters
from skyrl.models.megatron.layout import DecoderSizes, Layout, layout_of
from tests.inference.nano import nano_model
from tests.models.test_megatron_layout import assert_weights_come_back

QKV = "decoder.layers.1.self_attention.linear_qkv.adapter."
STORED = "model.layers.1.self_attn."


def adapted(**lora: Any) -> Any:
    """A model whose adapters have learned something."""
    model = with_adapter(nano_model("qwen2"), SkyRLLoraConfig(rank=4, alpha=8, **lora), seed=1, field="lora")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def layouts_of(model: Any, parts: int, *, joined: bool) -> list[Layout]:
    adapters = Adapters.of(model, joined=joined)
    assert adapters is not None
    assert (adapters.rank, adapters.scale) == (4, 2.0)
    sizes = DecoderSizes.of(model.config)
    return [with_adapters(layout_of(sizes, parts=parts, part=part), adapters) for part in range(parts)]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj", "down_proj")], ids=["all", "some"])
def test_weights_and_adapters_come_back_as_they_were(targets: Any, parts: int) -> None:
    model = adapted(target_modules=targets)
    weights = dict(named_weights(model))
    padded = DecoderSizes.of(model.config).padded_vocabulary(parts) // parts
    assert_weights_come_back(weights, layouts_of(model, parts, joined=False), padded)


def test_a_rank_has_its_rows_of_b_or_its_columns_of_a() -> None:
    layout = layouts_of(adapted(), 2, joined=False)[1]  # 4 heads of 8 in 2 groups, of width 32
    [a], [b] = layout[f"{QKV}a_q_proj"], layout[f"{QKV}b_q_proj"]
    assert (a.rows, a.columns, b.rows) == (range(4), None, range(16, 32))
    output = "decoder.layers.1.self_attention.linear_proj.adapter."
    [a], [b] = layout[f"{output}a_o_proj"], layout[f"{output}b_o_proj"]
    assert (a.columns, b.rows) == (range(16, 32), range(32))


def test_new_adapters_of_fused_layers_share_the_factor_of_the_first() -> None:
    model = adapted()
    drawn = {name: weight.clone() for name, weight in named_weights(model) if "lora" in name}
    [layout] = layouts_of(model, 1, joined=True)
    assert [piece.weight for piece in layout[f"{QKV}a"]] == [
        f"{STORED}{letter}_proj.lora_A.default.weight" for letter in "qkv"
    ]
    with pytest.raises(ModelError, match=r"q_proj and .*k_proj have separate factors A.*canonical_lora"):
        new_adapters_in_common(drawn, layout)
    new = {name: weight * ("lora_A" in name) for name, weight in drawn.items()}
    common = new_adapters_in_common(new, layout)
    first = new[f"{STORED}q_proj.lora_A.default.weight"]
    assert all(torch.equal(common[f"{STORED}{letter}_proj.lora_A.default.weight"], first) for letter in "qkv")


def test_an_adapter_of_the_output_head_is_refused() -> None:
    with pytest.raises(ModelError, match=r"none for lm_head: choose others in model\.lora\.target_modules"):
        layouts_of(adapted(target_modules=("q_proj", "lm_head")), 1, joined=True)
