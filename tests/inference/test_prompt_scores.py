"""Probabilities of a prompt: what transformers computes, whatever else the engine does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.inference.engine import Completion, PromptScores
from skyrl.inference.torch import causal_lm
from skyrl.inference.torch.engine import TorchEngine
from tests.inference.nano import KINDS, nano_model, nano_tokenizer, prompts, request


async def drawn(
    engine: TorchEngine, *prompts: tuple[int, ...], scores: bool = True, **sampling: Any
) -> list[Completion]:
    """The first completion of each prompt, all requested at once."""
    requests = [evolve(request(prompt, **sampling), scores_prompt=scores) for prompt in prompts]
    try:
        return [first for first, *_ in await asyncio.gather(*map(engine.generate, requests))]
    finally:
        await engine.close()


def assert_scores(model: torch.nn.Module, prompt: tuple[int, ...], scores: PromptScores | None) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1)
    assert scores is not None and len(scores.logprobs) == len(scores.likeliest) == len(prompt) - 1
    prompt_logprobs = expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(scores.logprobs, dtype=torch.float32), prompt_logprobs, atol=2e-5, rtol=1e-5
    )
    best = torch.tensor(scores.likeliest_logprobs, dtype=torch.float32)
    torch.testing.assert_close(best, expected.max(-1).values, atol=2e-5, rtol=1e-5)
    assert list(scores.likeliest) == expected.argmax(-1).tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_scores_are_those_of_one_forward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "_SCORED_TOKENS", 7)
    model, prompt_ids = nano_model(kind), prompts(1, 2, 7, 8, 40)
    engine = TorchEngine(model, nano_tokenizer(), max_num_seqs=8)
    reference = nano_model(kind)
    for prompt, completion in zip(prompt_ids, await drawn(engine, *prompt_ids, temperature=0.5), strict=True):
        assert_scores(reference, prompt, completion.prompt_scores)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_with_scores_draws_the_same_tokens(kind: str) -> None:
    prompt_ids = prompts(9, 20)
    plain, scored = [
        await drawn(TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=8), *prompt_ids, scores=scores)
        for scores in (False, True)
    ]
    assert [completion.token_ids for completion in plain] == [completion.token_ids for completion in scored]
    assert [completion.prompt_scores for completion in plain] == [None, None]


async def test_a_prefix_that_is_kept_does_not_shorten_the_scores() -> None:
    engine, prompt = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=8), prompts(70)[0]
    await engine.generate(request(prompt))
    (completion,) = await drawn(engine, prompt)
    assert_scores(nano_model(), prompt, completion.prompt_scores)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.1}, {"top_k": 1}, {"repetition_penalty": 2.0}, {"greedy": True}]
)
async def test_sampling_settings_do_not_change_scores(settings: dict[str, Any]) -> None:
    prompt = prompts(12)[0]
    (completion,) = await drawn(TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=8), prompt, **settings)
    assert_scores(nano_model(), prompt, completion.prompt_scores)
