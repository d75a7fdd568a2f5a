from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import GenerationConfig

from skyrl.inference.engine import GenerationRequest, InferenceEngine
from skyrl.inference.torch.engine import TorchEngine
from tests.inference.nano import EOS, KINDS, PAD, full_forward_logprobs, nano_model, nano_tokenizer, prompts, request
from tests.inference.steps import gate_of_model


def engine_for(kind: str = "qwen2", *, rows: int = 64, deterministic: bool = False) -> InferenceEngine:
    return TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=rows, deterministic=deterministic)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_equal_a_full_forward_pass_for_prompts_of_different_lengths(kind: str) -> None:
    engine, model = engine_for(kind), nano_model(kind)
    requests = [request(p, count=3, temperature=0.7) for p in prompts(1, 3, 9, 10, 30)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    for question, completions in zip(requests, answers, strict=True):
        for completion in completions:
            learned = full_forward_logprobs(model, question.prompt_ids, completion, temperature=0.7)
            torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen2, windows of 6"])
async def test_greedy_equals_transformers_generate(kind: str) -> None:
    engine, model = engine_for(kind), nano_model(kind)
    requests = [request(p, temperature=0.0, max_generate_length=25) for p in prompts(2, 7, 19)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    config = GenerationConfig(do_sample=False, max_new_tokens=25, eos_token_id=EOS, pad_token_id=PAD)
    for question, (completion,) in zip(requests, answers, strict=True):
        expected = model.generate(torch.tensor([question.prompt_ids]), generation_config=config)[0]
        assert completion.token_ids == tuple(expected[len(question.prompt_ids) :].tolist())


async def test_a_repetition_penalty_counts_prompt_and_completion_as_transformers_does() -> None:
    engine, model = engine_for(), nano_model()
    requests = [request(p, temperature=0.0, repetition_penalty=1.5) for p in prompts(2, 7, 19)]
    requests.append(request((1, 2, 3, 4), temperature=0.0))  # a row without penalty among them
    answers = await asyncio.gather(*map(engine.generate, requests))
    for question, (completion,) in zip(requests, answers, strict=True):
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=12,
            repetition_penalty=question.sampling.repetition_penalty,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        expected = model.generate(torch.tensor([question.prompt_ids]), generation_config=config)[0]
        assert completion.token_ids == tuple(expected[len(question.prompt_ids) :].tolist())
        (unbatched,) = await engine_for().generate(question)
        assert completion.logprobs == pytest.approx(unbatched.logprobs, abs=1e-5)  # padding was not counted


def crowd() -> list[GenerationRequest]:
    """Requests of all kinds: longer and shorter prompts and answers, greedy, cut, with stop strings."""
    long, short, other, penalised = prompts(40, 3, 12, 20, seed=5)
    return [
        request(long, count=5, max_generate_length=4),
        request(short, count=2, temperature=0.0),
        request(other, count=9, top_p=0.9, max_generate_length=30, stop=("a", "b")),
        request(penalised, count=3, repetition_penalty=1.2, min_p=0.02),
    ]


async def test_the_draws_of_a_sample_do_not_depend_on_what_else_is_in_flight() -> None:
    generation_request = request(prompts(11)[0], count=4, max_generate_length=30)
    unbatched = await engine_for().generate(generation_request)
    together, *_ = await asyncio.gather(*map(engine_for().generate, [generation_request, *crowd()]))
    assert [c.token_ids for c in together] == [c.token_ids for c in unbatched]
    for completion, batched_completion in zip(unbatched, together, strict=True):
        assert completion.logprobs == pytest.approx(batched_completion.logprobs, abs=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, 11, 33])
async def test_deterministic_mode_is_equal_bit_for_bit_alone_and_in_a_crowd(length: int) -> None:
    generation_request = request(prompts(length)[0], count=6, max_generate_length=40, temperature=0.9)
    unbatched = await engine_for(deterministic=True).generate(generation_request)
    *_, together = await asyncio.gather(*map(engine_for(deterministic=True).generate, [*crowd(), generation_request]))
    assert together == unbatched


async def test_requests_that_join_later_get_the_same_answers() -> None:
    model = nano_model()
    engine, steps = TorchEngine(model, nano_tokenizer(), max_num_seqs=8), gate_of_model(model)
    steps.hold(after=10)
    early = request(prompts(5)[0], count=4, max_generate_length=120)
    late = [request(p, count=2, max_generate_length=20) for p in prompts(50, 2, 130, 1, seed=3)]
    running = asyncio.create_task(engine.generate(early))
    answers = []
    for question in late:
        await steps.held()
        steps.hold(after=10)
        answers.append(asyncio.create_task(engine.generate(question)))
    steps.release()
    for question, answer in zip([early, *late], await asyncio.gather(running, *answers), strict=True):
        unbatched = await engine_for().generate(question)
        assert [c.token_ids for c in answer] == [c.token_ids for c in unbatched]
