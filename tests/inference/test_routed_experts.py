"""The torch engine names the experts that each token met."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.errors import ModelError
from skyrl.inference.engine import Completion, NewTokens
from skyrl.inference.torch.engine import TorchEngine
from skyrl.models.routers import ChoiceRecorder, restored_choices
from tests.inference.nano import nano_model, nano_tokenizer, prompts, request


def met(kind: str, prompt: tuple[int, ...], completion: Completion) -> Any:
    """The experts of each computed token and layer in one pass over the sequence, in ascending order."""
    model = nano_model(kind)
    recorder = ChoiceRecorder(model)
    with torch.no_grad():
        model(torch.tensor([prompt + completion.token_ids[:-1]]), use_cache=False)
    return recorder.take().sort(-1).values


def named(completion: Completion) -> Any:
    assert completion.routed_experts is not None
    return restored_choices(completion.routed_experts).sort(-1).values


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
async def test_all_tokens_but_the_newest_come_with_the_experts_of_a_whole_pass(kind: str) -> None:
    engine = TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=4, returns_experts=True)
    requests = [request(prompt, count=2) for prompt in prompts(5, 9, 10, 17)]  # some wait, and join a ragged batch
    drawn = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    for generation_request, completions in zip(requests, drawn, strict=True):
        for completion in completions:
            assert named(completion).equal(met(kind, generation_request.prompt_ids, completion))


async def test_tokens_that_are_computed_anew_after_a_pause_keep_the_experts_that_they_met() -> None:
    engine = TorchEngine(nano_model("qwen3_moe"), nano_tokenizer(), max_num_seqs=2, returns_experts=True)
    loop = asyncio.get_running_loop()
    third, gate = asyncio.Event(), threading.Event()

    def hold_behind_the_third(new: NewTokens) -> None:
        if new.start == 2:
            loop.call_soon_threadsafe(third.set)
            assert gate.wait(60)

    generation_request = evolve(request((1, 2, 3)), on_tokens=hold_behind_the_third)
    drawing = asyncio.ensure_future(engine.generate(generation_request))
    await asyncio.wait_for(third.wait(), 60)
    pausing = asyncio.ensure_future(engine.pause("recompute"))
    await asyncio.sleep(0)
    gate.set()
    await pausing
    with torch.no_grad():  # the routers of now would choose others
        for layer in engine._causal_lm.hf_model.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    await engine.resume()
    (drawn,) = await drawing
    await engine.close()
    assert len(drawn.token_ids) > 4
    before = 3 + 2  # the prompt, and two of the three tokens: the newest was not computed
    met_first = met("qwen3_moe", (1, 2, 3), drawn)
    assert named(drawn)[:before].equal(met_first[:before])
    assert not named(drawn)[before:].equal(met_first[before:])


def test_a_model_without_experts_has_none_to_name() -> None:
    with pytest.raises(ModelError, match="no experts"):
        TorchEngine(nano_model("qwen3"), nano_tokenizer(), max_num_seqs=4, returns_experts=True)
