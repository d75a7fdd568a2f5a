from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from skyrl.inference import projections
from skyrl.inference.fused_decoder import FusedDecoder
from skyrl.inference.torch_engine import TorchEngine
from tests.inference.nano import full_forward_logprobs, nano_model, nano_tokenizer, prompts, request


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections as they are where oneDNN is not: fused weights that the model's parameters are views of."""
    monkeypatch.setattr(projections, "packs", lambda weight: False)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "qwen3", "llama"])
@pytest.mark.usefixtures("unpacked")
async def test_fused_weights_without_packing_give_the_logprobs_of_a_full_forward_pass(kind: str) -> None:
    engine = TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=8)
    asked = request(prompts(9)[0], count=2)
    for completion in await engine.generate(asked):
        learned = full_forward_logprobs(nano_model(kind), asked.prompt_ids, completion, temperature=1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("unpacked")
def test_fusing_keeps_every_weight_where_the_model_finds_it() -> None:
    model, fresh = nano_model(), nano_model()
    for _ in range(2):  # another decoder of the same model
        with torch.inference_mode():
            list(FusedDecoder(model).prefill([[1, 2]], [None]))
    for (name, ours), theirs in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    attention = model.model.layers[0].self_attn
    storages = {layer.weight.untyped_storage().data_ptr() for layer in (attention.q_proj, attention.k_proj)}
    assert len(storages) == 1


def test_weights_that_were_replaced_are_computed_with_after_a_refresh() -> None:
    model = nano_model()
    decoder = FusedDecoder(model)
    with torch.inference_mode():
        [before] = decoder.prefill([[1, 2]], [None])
        model.model.norm.weight.mul_(2.0)
        model.model.layers[0].mlp.down_proj.weight.zero_()
        decoder.refresh()
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


async def test_an_engine_that_slept_samples_from_the_same_weights() -> None:
    engine, asked = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=4), request((1, 2, 3))
    before = await engine.generate(asked)
    await engine.pause()
    await engine.sleep()
    await engine.wake()
    await engine.resume()
    assert await engine.generate(asked) == before
