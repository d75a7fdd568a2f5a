from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from skyrl.inference.torch import fused_decoder, projections
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.torch.fused_decoder import FusedDecoder
from skyrl.inference.torch.prefix_cache import CachedPrefix
from skyrl.models import onednn
from skyrl.models.attention import varlen_attention
from tests.inference.nano import full_forward_logprobs, nano_model, nano_tokenizer, prompts, request
from tests.models.test_varlen_attention import loop


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections as they are where oneDNN is not: fused weights that the model's parameters are views of."""
    monkeypatch.setattr(projections, "packs", lambda weight: False)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "qwen3", "llama"])
@pytest.mark.usefixtures("unpacked")
async def test_fused_weights_without_packing_give_the_logprobs_of_a_full_forward_pass(kind: str) -> None:
    engine = TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=8)
    generation_request = request(prompts(9)[0], count=2)
    for completion in await engine.generate(generation_request):
        learned = full_forward_logprobs(nano_model(kind), generation_request.prompt_ids, completion, temperature=1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("unpacked")
def test_fusing_keeps_every_weight_where_the_model_finds_it() -> None:
    model, fresh = nano_model(), nano_model()
    for _ in range(2):  # another decoder of the same model
        with torch.inference_mode():
            list(FusedDecoder(model).prefill([[1, 2]], [None]))
    for (name, weight), fresh_weight in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(weight, fresh_weight), name
    attention = model.model.layers[0].self_attn
    storages = {layer.weight.untyped_storage().data_ptr() for layer in (attention.q_proj, attention.k_proj)}
    assert len(storages) == 1


@pytest.mark.usefixtures("unpacked")
def test_fused_weights_keep_their_memory_when_they_are_replaced() -> None:
    model, other = nano_model("qwen3"), nano_model("qwen3", seed=1)
    decoder = FusedDecoder(model)
    with torch.inference_mode():
        other.model.layers[0].self_attn.q_norm.weight.mul_(2.0)  # a new model has ones
        before = decoder.addresses()
        for weight, other_weight in zip(model.parameters(), other.parameters(), strict=True):
            weight.copy_(other_weight)
        decoder.invalidate()
        assert decoder.addresses() == before
        [prefix] = decoder.prefill([[1, 2]], [None])
        expected = other(torch.tensor([[1, 2]])).logits[0, -1]
    torch.testing.assert_close(prefix.logits, expected, atol=1e-5, rtol=1e-5)


def test_prompts_of_all_lengths_share_a_kernel_where_it_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [list(prompt) for prompt in prompts(5, 5, 1, 12, 30)]
    decoder, calls = FusedDecoder(nano_model().bfloat16()), list[int]()

    def counted(*tensors: Any, **options: Any) -> Any:
        calls.append(len(tensors[3]) - 1)
        return loop(*tensors, **options)

    with torch.inference_mode():
        [full_prefix] = decoder.prefill([listed[3]], [None])
        layers = tuple((keys[:, :9], values[:, :9]) for keys, values in full_prefix.layers)
        kept = [None, None, None, CachedPrefix(ids=tuple(listed[3][:9]), layers=layers), None]
        expected = list(decoder.prefill(listed, kept))
        monkeypatch.setattr(fused_decoder, "has_varlen_kernels", lambda device: True)
        monkeypatch.setattr(varlen_attention, "_flash_attention", counted)
        actual = list(decoder.prefill(listed, kept))
    assert calls == [5, 5]  # one call for each layer
    for prefix, expected_prefix in zip(actual, expected, strict=True):
        torch.testing.assert_close(prefix.logits, expected_prefix.logits, atol=0.1, rtol=0.05)  # bfloat16
        assert [part.shape for layer in prefix.layers for part in layer] == [
            p.shape for layer in expected_prefix.layers for p in layer
        ]
        torch.testing.assert_close(prefix.layers[0][0], expected_prefix.layers[0][0])


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bfloat16 as on a processor for which torch does not pack it, and float32, which it packs on each."""
    pack = onednn.packed

    def refuse(weight: Tensor, rows: int) -> Tensor:
        if weight.dtype is torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support avx512bw, avx512vl and avx512dq")
        return pack(weight, rows)

    monkeypatch.setattr(onednn, "packed", refuse)
    onednn.packs.cache_clear()
    yield
    onednn.packs.cache_clear()


@pytest.mark.parametrize("float32_head", [False, True])
@pytest.mark.usefixtures("refused")
def test_a_type_that_the_processor_does_not_pack_is_computed_without_packing(float32_head: bool) -> None:
    assert (onednn.packs(torch.bfloat16), onednn.packs(torch.float32)) == (False, True)
    model = nano_model().bfloat16()
    with torch.inference_mode():
        [prefix] = FusedDecoder(model, float32_head=float32_head).prefill([[1, 2, 3]], [None])
        expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert prefix.logits.dtype is (torch.float32 if float32_head else torch.bfloat16)
    torch.testing.assert_close(prefix.logits.bfloat16(), expected, atol=0.1, rtol=0.05)  # bfloat16


def test_weights_that_were_replaced_are_computed_with_after_a_refresh() -> None:
    model = nano_model()
    decoder = FusedDecoder(model)
    with torch.inference_mode():
        [before] = decoder.prefill([[1, 2]], [None])
        model.model.norm.weight.mul_(2.0)
        model.model.layers[0].mlp.down_proj.weight.zero_()
        decoder.invalidate()
        [after] = decoder.prefill([[1, 2]], [None])
        expected = model(torch.tensor([[1, 2]])).logits[0, -1]
    assert not torch.allclose(before.logits, expected, atol=1e-3)
    torch.testing.assert_close(after.logits, expected, atol=1e-5, rtol=1e-5)


class Scaled(Qwen2ForCausalLM):
    """A model of somebody else, whose forward pass is its own."""


def other(kind: str, **config: Any) -> Any:
    model = nano_model(kind)
    for name, value in config.items():
        setattr(model.config, name, value)
    return model


def test_only_models_with_exactly_this_forward_pass_are_supported() -> None:
    scaled = nano_model()
    scaled.__class__ = Scaled
    assert FusedDecoder.supports(nano_model("qwen3"))
    assert not FusedDecoder.supports(scaled)
    assert not FusedDecoder.supports(other("qwen2", hidden_act="gelu"))
    assert not FusedDecoder.supports(nano_model("qwen2, windows of 6"))


async def test_flash_attention_is_replaced_by_the_forward_pass_of_the_engine() -> None:
    model, requests = nano_model(), [request(prompt, count=2) for prompt in prompts(3, 9)]
    model.config._attn_implementation = "flash_attention_2"  # whose package need not be there
    engines = [TorchEngine(network, nano_tokenizer(), max_num_seqs=4) for network in (model, nano_model())]
    actual, expected = [await asyncio.gather(*map(engine.generate, requests)) for engine in engines]
    assert actual == expected


async def test_an_engine_that_slept_samples_from_the_same_weights() -> None:
    engine, generation_request = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=4), request((1, 2, 3))
    before = await engine.generate(generation_request)
    await engine.pause()
    await engine.sleep()
    await engine.wake()
    await engine.resume()
    assert await engine.generate(generation_request) == before
