from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.inference.engine import Completion
from skyrl.inference.torch.engine import TorchEngine, load_torch_engine
from skyrl.inference.torch.prefix_cache import KeptPrefixes
from skyrl.weight_receiver.incoming_weights import SharedWeights
from tests.inference.nano import full_forward_logprobs, nano_model, nano_tokenizer, prompts, request
from tests.inference.steps import gate_of_model
from tests.inference.vllm_models import saved, small_model


def layers(*ids: int) -> Any:
    """One layer, one head of width 2, 16 bytes per token."""
    states = torch.tensor(ids, dtype=torch.float32)[None, :, None].expand(1, len(ids), 2)
    return ((states, -states),)


A, B = tuple(range(20)), (*range(12), *range(50, 58))


def test_the_longest_kept_beginning_is_found_without_the_last_token() -> None:
    kept = KeptPrefixes(10_000)
    kept.keep(A[:10], layers(*A[:10]))
    kept.keep(A, layers(*A))
    kept.keep(B, layers(*B))
    for prompt, length in [
        ((*A, 7, 8), 20),
        (A, 19),
        ((*A[:17], 99, 99), 17),
        ((*B, 1), 20),
        (A[:8], 0),
        ((9,) * 30, 0),
    ]:
        prefix = kept.find(prompt)
        assert (0 if prefix is None else len(prefix.ids)) == length
        if prefix is not None:
            assert prefix.ids == prompt[:length]
            assert prefix.layers[0][0][0, :, 0].tolist() == list(prompt[:length])


def test_memory_is_bounded_and_the_least_recently_used_go_first() -> None:
    kept = KeptPrefixes(16 * 45)
    for first in (100, 200):
        kept.keep(tuple(range(first, first + 20)), layers(*range(20)))
    assert kept.find(tuple(range(100, 125))) is not None
    kept.keep(tuple(range(300, 320)), layers(*range(20)))
    assert kept.size == 16 * 40
    assert kept.find(tuple(range(200, 225))) is None
    assert kept.find(tuple(range(100, 125))) is not None
    kept.keep(tuple(range(400, 450)), layers(*range(50)))  # more than all of the memory
    assert kept.find(tuple(range(400, 451))) is None
    kept.clear()
    assert kept.size == 0 and kept.find(tuple(range(100, 125))) is None


def test_what_is_kept_does_not_change_with_the_storage_it_came_from() -> None:
    kept, storage = KeptPrefixes(10_000), torch.zeros(1, 8, 2)
    kept.keep(A[:8], ((storage, storage),))
    storage.fill_(1.0)
    prefix = kept.find(A[:9])
    assert prefix is not None and prefix.layers[0][0].sum() == 0


def watched(kind: str = "qwen2", **options: Any) -> tuple[TorchEngine, list[int], Any]:
    """An engine that never ends a sequence, the tokens of each of its forward passes, and its model."""
    model, tokens, tokenizer = nano_model(kind), list[int](), nano_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: tokens.append(args[0].numel()))
    return TorchEngine(model, tokenizer, max_num_seqs=16, **options), tokens, model


async def converse(engine: TorchEngine, turns: int) -> list[tuple[tuple[int, ...], Completion]]:
    """Prompt and answer of each turn; a user adds 10 tokens before the next."""
    prompt, conversation = prompts(20)[0], []
    for turn in range(turns):
        generation_request = request(prompt, name=f"turn {turn}", max_generate_length=8)
        (answer,) = await engine.generate(generation_request)
        conversation.append((prompt, answer))
        prompt = prompt + answer.token_ids + prompts(10, seed=turn)[0]
    return conversation


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
async def test_each_turn_of_a_conversation_computes_what_is_new_in_it(kind: str) -> None:
    engine, tokens, model = watched(kind)
    conversation = await converse(engine, turns=4)
    assert [count for count in tokens if count > 1] == [20, 11, 11, 11]  # the last token drawn was not computed yet
    for prompt, answer in conversation:
        learned = full_forward_logprobs(model, prompt, answer, temperature=1.0)
        torch.testing.assert_close(torch.tensor(answer.logprobs), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"prefix_bytes": 0}, {"several_turns": False}])
async def test_deterministic_mode_and_no_memory_compute_every_prompt_whole(options: dict[str, Any]) -> None:
    engine, tokens, _ = watched(**options)
    await converse(engine, turns=3)
    assert [count for count in tokens if count > 1] == [20, 38, 56]


@pytest.mark.parametrize("several_turns", [True, False])
async def test_a_beginning_that_prompts_have_in_common_is_computed_once(several_turns: bool) -> None:
    engine, tokens, model = watched(several_turns=several_turns)
    system = prompts(100)[0]
    requests = [request(system + p, name=str(len(p)), max_generate_length=4) for p in prompts(3, 7, 20)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    assert tokens[:2] == [100, 30]
    for question, (answer,) in zip(requests, answers, strict=True):
        learned = full_forward_logprobs(model, question.prompt_ids, answer, temperature=1.0)
        torch.testing.assert_close(torch.tensor(answer.logprobs), learned, atol=1e-5, rtol=1e-5)


async def test_new_weights_leave_no_keys_of_older_ones_not_even_of_samples_that_a_pause_kept() -> None:
    engine, tokens, model = watched()
    steps, generation_request = gate_of_model(model), request(prompts(20)[0], max_generate_length=20)
    steps.hold(after=5)
    running = asyncio.create_task(engine.generate(generation_request))
    await steps.held()
    pausing = asyncio.create_task(engine.pause("keep"))
    await asyncio.sleep(0)
    steps.release()
    await pausing
    weights = SharedWeights(tuple(nano_model(seed=1).state_dict().items()))
    await engine.load_weights(weights, version=1)
    await engine.resume()
    ((answer,), fresh) = await running, nano_model(seed=1)
    assert set(answer.weight_versions) == {0, 1}
    tokens.clear()
    prompt = generation_request.prompt_ids + answer.token_ids + (1, 2)
    (later,) = await engine.generate(request(prompt))
    assert tokens[0] == 42
    learned = full_forward_logprobs(fresh, prompt, later, temperature=1.0)
    torch.testing.assert_close(torch.tensor(later.logprobs), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("caching", "second"), [(True, 1), (False, 20)])
async def test_prefix_caching_is_the_choice_of_who_loads_the_engine(tmp_path: Path, caching: bool, second: int) -> None:
    path = str(saved(tmp_path / "model", small_model()))
    engine = load_torch_engine(
        path, dtype="float32", attention="sdpa", device="cpu", max_num_seqs=4, prefix_caching=caching
    )
    generation_request, tokens = request(prompts(20)[0], max_generate_length=1), list[int]()
    assert isinstance(engine, TorchEngine)
    model: Any = engine._causal_lm.hf_model
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: tokens.append(args[0].numel()))
    await engine.generate(generation_request)
    await engine.generate(generation_request)
    assert tokens == [20, second]
