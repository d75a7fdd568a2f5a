"""Compiled decoder layers: few compilations, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl.learners.data_parallel import computing_in
from skyrl.learners.schedule import recompute_activations
from skyrl.models.attention.segment_attention import SEGMENTS, Segments, register
from skyrl.models.attention.segments import Segment
from skyrl.models.fused_layers import compile_layers


def three_layers() -> Any:
    register()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(SEGMENTS)
    return model.eval()


def pass_over(model: Any, lengths: tuple[int, ...]) -> list[Tensor]:
    """Logits of a packed row, and the gradients of all weights."""
    model.zero_grad()
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    segments = Segments(tuple(map(Segment, starts, lengths)), torch.device("cpu"))
    ids = torch.arange(sum(lengths)).unsqueeze(0) * 7 % 50
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    with computing_in(model, torch.bfloat16):
        logits = model(input_ids=ids, position_ids=positions, segments=segments, use_cache=False).logits
        logits.float().square().mean().backward()
    return [logits, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.long), True])
def test_layers_of_one_kind_are_compiled_once_for_all_lengths(recompute: bool) -> None:
    model, rows = three_layers(), [(9, 14), (30,), (5, 6, 7)]
    if recompute:
        recompute_activations(model, use_reentrant=False, draws=False)
    expected = [pass_over(model, lengths) for lengths in rows]
    torch.compiler.reset()
    counters.clear()
    assert compile_layers(model, backend="aot_eager") == 3
    results = [pass_over(model, lengths) for lengths in rows]
    torch.testing.assert_close(results, expected, atol=2e-2, rtol=2e-2)
    assert counters["stats"]["unique_graphs"] == 4, "before, between and after attention, and the layer's end"
    torch.compiler.reset()
