from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from skyrl.errors import ModelError
from skyrl.inference.torch import projections
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.torch.projections import JoinedGateUp, Quantized
from skyrl.weight_receiver.incoming_weights import SharedWeights
from tests.inference.nano import full_forward_logprobs, nano_model, nano_tokenizer, prompts, request


def engine(kind: str = "qwen2", **settings: Any) -> TorchEngine:
    return TorchEngine(nano_model(kind).bfloat16(), nano_tokenizer(), max_num_seqs=8, int8=True, **settings)


def layer(seed: int, *, bias: bool = False, size: tuple[int, int] = (64, 48)) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(*size, bias=bias)


def test_the_largest_of_a_row_is_127_of_its_scale() -> None:
    levels, scales = projections.quantized(torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert levels.tolist() == [[32.0, -127.0, 64.0], [0.0, 0.0, 0.0]]  # 31.75 and 63.5, rounded
    assert scales[0].item() == pytest.approx(2 / 127)


@pytest.mark.vnni
@torch.no_grad()
def test_the_product_is_that_of_both_rounded_sides() -> None:
    linear, x, residual = layer(0, bias=True), torch.randn(9, 64), torch.randn(9, 48)
    rounded_x, rounded_w = (levels * scales for levels, scales in map(projections.quantized, (x, linear.weight)))
    expected = nn.functional.linear(rounded_x, rounded_w, linear.bias)
    torch.testing.assert_close(Quantized(linear)(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(Quantized(linear).plus(x, residual), expected + residual, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    projection, x = Quantized(layer(0)), torch.randn(8, 64)
    other = torch.cat([x[:1], 100 * torch.randn(7, 64)])
    assert torch.equal(projection(x)[0], projection(other)[0])
    torch.testing.assert_close(projection(x[:1])[0], projection(x)[0], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_gate_and_up_are_the_gated_product_of_both_layers() -> None:
    gate, up, x = layer(0), layer(1), torch.randn(5, 64)
    expected = nn.functional.silu(Quantized(gate)(x)) * Quantized(up)(x)
    torch.testing.assert_close(JoinedGateUp(Quantized(gate, up))(x), expected)


@torch.no_grad()
def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    assert not Quantized(layer(0))(x).isfinite().any()


@pytest.mark.vnni
@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "qwen3", "llama"])
async def test_samples_in_eight_bits_are_the_models_but_for_hundredths_of_a_nat(kind: str) -> None:
    generation_request = request(prompts(9)[0], count=4, max_generate_length=16)
    for completion in await engine(kind).generate(generation_request):
        exact = full_forward_logprobs(nano_model(kind), generation_request.prompt_ids, completion, 1.0)
        difference = (torch.tensor(completion.logprobs) - exact).abs().mean()
        assert 1e-4 < difference < 0.1


@pytest.mark.vnni
async def test_a_sample_in_deterministic_mode_is_the_same_alone_and_among_others() -> None:
    unbatched_engine, among = engine(deterministic=True), engine(deterministic=True)
    generation_request, other = request((1, 2, 3), count=2), request((4, 5, 6, 7), count=3)
    _, answer = await asyncio.gather(among.generate(other), among.generate(generation_request))
    assert await unbatched_engine.generate(generation_request) == answer


@pytest.mark.vnni
async def test_new_weights_are_rounded_anew() -> None:
    sampling, generation_request = engine(), request((1, 2, 3), temperature=0.0)
    await sampling.pause()
    learned = nano_model(seed=1)
    await sampling.load_weights(SharedWeights(tuple((n, p.detach()) for n, p in learned.named_parameters())), version=1)
    await sampling.resume()
    fresh = TorchEngine(learned.bfloat16(), nano_tokenizer(), max_num_seqs=8, int8=True)
    (actual,), (expected,) = await sampling.generate(generation_request), await fresh.generate(generation_request)
    assert (actual.token_ids, actual.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.parametrize("kind", ["qwen2, eager", "qwen2, windows of 6"])
def test_models_that_transformers_computes_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match='rollout_dtype = "int8" supports only Llama, Qwen2 and Qwen3'):
        engine(kind)


def test_a_processor_that_cuts_sums_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Quantized._multiply_levels
    monkeypatch.setattr(Quantized, "_multiply_levels", lambda self, levels: exact(self, levels).clamp(max=16.0))
    with pytest.raises(ModelError, match="needs a processor with VNNI"):
        engine()


def test_another_device_is_refused() -> None:
    with pytest.raises(ModelError, match="needs a CPU"):
        projections.refuse_without_kernels(torch.device("meta"))
