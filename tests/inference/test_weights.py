from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.errors import WeightSyncError
from skyrl.inference import adapters, weights
from skyrl.inference.engine import InFlight
from skyrl.inference.torch.engine import TorchEngine
from skyrl.weight_receiver.incoming_weights import SharedWeights, digest, verified, weight_info
from tests.inference.nano import full_forward_logprobs, nano_model, nano_tokenizer, request

Weights = dict[str, Tensor]
ASKED = request((1, 2, 3), count=2, temperature=0.0, max_generate_length=20)


def learned(kind: str = "qwen2") -> Weights:
    """Another model's weights, under the names that a learner sends: no tied duplicate."""
    return {name: parameter.detach() for name, parameter in nano_model(kind, seed=1).named_parameters()}


def shared(weights: Weights) -> SharedWeights:
    return SharedWeights(tuple(weights.items()))


async def paused_engine(kind: str = "qwen2") -> TorchEngine:
    engine = TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=8)
    await engine.generate(ASKED)
    await engine.pause()
    return engine


@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "llama", "qwen3"])
async def test_new_weights_are_sampled_from_and_every_token_carries_their_version(kind: str) -> None:
    engine = await paused_engine(kind)
    await engine.load_weights(shared(learned(kind)), version=5)
    await engine.resume()
    expected = await TorchEngine(nano_model(kind, seed=1), nano_tokenizer(), max_num_seqs=8).generate(ASKED)
    answer = await engine.generate(ASKED)
    assert [(c.token_ids, c.logprobs) for c in answer] == [(c.token_ids, c.logprobs) for c in expected]
    assert set(answer[0].weight_versions) == {engine.weight_version} == {5}


@pytest.mark.parametrize("names", [("lm_head.weight",), ("lm_head.weight", "model.embed_tokens.weight")])
async def test_a_tied_weight_may_come_under_any_of_its_names(names: tuple[str, ...]) -> None:
    engine, weights = await paused_engine("qwen2, tied"), learned("qwen2, tied")
    embedding = weights.pop("model.embed_tokens.weight")
    await engine.load_weights(shared(weights | dict.fromkeys(names, embedding)), version=1)
    await engine.resume()
    expected = await TorchEngine(nano_model("qwen2, tied", seed=1), nano_tokenizer(), max_num_seqs=8).generate(ASKED)
    assert [c.token_ids for c in await engine.generate(ASKED)] == [c.token_ids for c in expected]


def without(weights: Weights, name: str) -> Weights:
    return {key: value for key, value in weights.items() if key != name}


BROKEN: dict[str, tuple[str, Any, str]] = {
    "missing": ("qwen2", lambda w: without(w, "model.norm.weight"), "model.norm.weight is missing"),
    "unknown": ("qwen2", lambda w: w | {"v_head.weight": torch.zeros(1)}, "v_head.weight is not a weight"),
    "another shape": ("qwen2", lambda w: w | {"model.norm.weight": torch.zeros(3)}, r"has shape \(3,\), .* \(32,\)"),
    "untied": ("qwen2, tied", lambda w: w | {"lm_head.weight": torch.zeros(258, 32)}, "sent with different values"),
    "nothing": ("qwen2", lambda w: {}, "and 22 more"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", BROKEN)
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_kept(case: str) -> None:
    kind, break_them, message = BROKEN[case]
    engine = await paused_engine(kind)
    with pytest.raises(WeightSyncError, match=message):
        await engine.load_weights(shared(break_them(learned(kind))), version=5)
    await engine.resume()
    assert engine.weight_version == 0
    expected = await TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=8).generate(ASKED)
    assert await engine.generate(ASKED) == expected


@pytest.mark.parametrize(("kept", "message"), [(3, "^d did not arrive$"), (1, "^b and 2 more did not arrive$")])
def test_weights_that_were_announced_and_never_came_are_named(kept: int, message: str) -> None:
    weights = [(name, torch.ones(2)) for name in "abcd"]
    came = [(name, tensor, digest(tensor)) for name, tensor in weights[:kept]]
    with pytest.raises(WeightSyncError, match=message):
        list(verified(iter(came), [weight_info(*weight) for weight in weights]))


async def test_a_name_sent_twice_is_refused() -> None:
    engine, weights = await paused_engine(), tuple(learned().items())
    with pytest.raises(WeightSyncError, match="sent twice"):
        await engine.load_weights(SharedWeights((*weights, weights[0])), version=1)


async def test_weights_are_refused_unless_paused_and_idle() -> None:
    model, computing = nano_model(), threading.Event()
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: computing.set())
    engine = TorchEngine(model, nano_tokenizer(), max_num_seqs=8)
    with pytest.raises(WeightSyncError, match="pause"):
        await engine.load_weights(shared(learned()), version=1)
    running = asyncio.create_task(engine.generate(request((1, 2, 3), count=8, max_generate_length=200)))
    await asyncio.to_thread(computing.wait)
    pausing = asyncio.create_task(engine.pause())
    await asyncio.sleep(0)
    with pytest.raises(WeightSyncError, match="pause"):
        await engine.load_weights(shared(learned()), version=1)
    await asyncio.gather(running, pausing)
    await engine.load_weights(shared(learned()), version=1)
    assert engine.weight_version == 1


@pytest.mark.parametrize("in_flight", ["finish", "keep", "recompute"])
async def test_an_engine_that_does_not_hold_what_came_draws_nothing_until_a_complete_set_has_been_loaded(
    monkeypatch: pytest.MonkeyPatch, in_flight: InFlight
) -> None:
    computing = threading.Event()
    model = nano_model()
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: computing.set())
    engine = TorchEngine(model, nano_tokenizer(), max_num_seqs=1)
    asked = [engine.generate(request((1, 2, 3), max_generate_length=200, min_new_tokens=200)) for _ in range(2)]
    calls = [asyncio.ensure_future(call) for call in asked]
    await asyncio.to_thread(computing.wait)
    await engine.pause(in_flight)  # the second one waits

    def differs(pairs: Any) -> None:
        raise WeightSyncError("a weight is another one")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "refuse_not_loaded", differs)
        with pytest.raises(WeightSyncError, match="version 1 stopped halfway: a weight is another one"):
            await engine.load_weights(shared(learned()), version=1)
    await engine.resume()
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    refused = [outcome for outcome in outcomes if isinstance(outcome, WeightSyncError)]
    assert len(refused) == (1 if in_flight == "finish" else 2)
    with pytest.raises(WeightSyncError, match="a weight is another one"):
        await engine.generate(ASKED)
    await engine.pause()
    with pytest.raises(WeightSyncError, match="a weight is another one"):
        await engine.load_weights(adapters.shared((), rank=1, alpha=1.0), version=2)
    await engine.load_weights(shared(learned()), version=2)
    await engine.resume()
    expected = await TorchEngine(nano_model(seed=1), nano_tokenizer(), max_num_seqs=8).generate(ASKED)
    assert [sample.token_ids for sample in await engine.generate(ASKED)] == [sample.token_ids for sample in expected]
    await engine.close()


async def test_weights_are_cast_to_the_type_of_the_model() -> None:
    engine = await paused_engine()
    await engine.load_weights(shared({name: tensor.bfloat16() for name, tensor in learned().items()}), version=2)
    await engine.resume()
    assert len(await engine.generate(ASKED)) == 2


async def test_rollouts_in_bfloat16_take_weights_of_float32_and_draw_what_the_rounded_model_draws() -> None:
    engine = TorchEngine(nano_model().bfloat16(), nano_tokenizer(), max_num_seqs=8)
    await engine.pause()
    await engine.load_weights(shared(learned()), version=1)
    await engine.resume()
    rounded, unrounded = nano_model(seed=1).bfloat16().float(), nano_model(seed=1)
    for completion in await engine.generate(ASKED):
        own, exact = (full_forward_logprobs(m, ASKED.prompt_ids, completion, 1.0) for m in (rounded, unrounded))
        assert (torch.tensor(completion.logprobs) - own).abs().mean() < 0.1
        assert not torch.equal(own, exact)


@pytest.mark.parametrize(
    ("came", "message"),
    [
        ([("a", torch.ones(2), digest(torch.zeros(2)))], "^a was changed in transit: digest .* arrived, .* was sent$"),
        ([("a", torch.ones(3), digest(torch.ones(3)))], "^a arrived twice, unannounced, or with a different shape"),
        ([("z", torch.ones(2), digest(torch.ones(2)))], "^z arrived twice, unannounced, or with"),
        ([("a", torch.ones(2), digest(torch.ones(2)))] * 2, "^a arrived twice"),
    ],
)
def test_a_weight_that_is_not_what_was_announced_and_sent_is_named(
    came: list[tuple[str, torch.Tensor, str]], message: str
) -> None:
    with pytest.raises(WeightSyncError, match=message):
        list(verified(iter(came), [weight_info("a", torch.ones(2)), weight_info("b", torch.ones(2))]))
