from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from skyrl.errors import ModelError, RunError
from skyrl.inference.torch.engine import TorchEngine
from tests.inference.nano import nano_model, nano_tokenizer, prompts, request
from tests.inference.steps import gate_of_model


class Shapes(list[tuple[int, int]]):
    """The (rows, tokens) of every forward pass. Prompts that are computed together are one row."""

    def note(self, embedding: Any, args: Any) -> None:
        (ids,) = args
        rows, tokens = ids.shape
        self.append((rows, tokens))


def watched(**options: Any) -> tuple[TorchEngine, Shapes, Any]:
    """An engine without an end-of-sequence token, the shapes of what it computes, and its model."""
    model, shapes = nano_model(), Shapes()
    model.generation_config.eos_token_id = None
    tokenizer = nano_tokenizer()
    tokenizer.eos_token = None
    model.get_input_embeddings().register_forward_pre_hook(shapes.note)
    return TorchEngine(model, tokenizer, **{"max_num_seqs": 16, **options}), shapes, model


async def test_requests_made_together_share_every_forward_pass_and_prompts_are_computed_once() -> None:
    engine, shapes, _ = watched()
    requests = [request(p, count=4, max_generate_length=5) for p in prompts(5, 8, 20)]
    await asyncio.gather(*map(engine.generate, requests))
    assert shapes == [(1, 33), *[(12, 1)] * 4]  # the first of five tokens comes from the prefill


async def test_rows_that_finished_leave_the_batch() -> None:
    engine, shapes, _ = watched()
    lengths = [1, 2, 2, 5]
    requests = [request((1, 2), count=3, max_generate_length=n, name=str(i)) for i, n in enumerate(lengths)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    assert [[len(c.token_ids) for c in group] for group in answers] == [[n] * 3 for n in lengths]
    assert shapes[1:] == [(9, 1), (3, 1), (3, 1), (3, 1)]


async def test_no_more_rows_than_allowed_are_decoded_together_and_freed_rows_are_filled_again() -> None:
    engine, shapes, _ = watched(max_num_seqs=4)
    requests = [request((1, 2), count=2, max_generate_length=n, name=str(n)) for n in (3, 9, 4)]
    await asyncio.gather(*map(engine.generate, requests))
    assert max(rows for rows, tokens in shapes if tokens == 1) == 4
    assert len([1 for _, tokens in shapes if tokens == 1]) == 8  # the third request ran beside the second


async def test_more_samples_than_rows_are_drawn_in_turns() -> None:
    engine, shapes, _ = watched(max_num_seqs=4)
    wide, _, _ = watched(max_num_seqs=16)
    generation_request = request((1, 2), count=10, max_generate_length=6)
    answer = await engine.generate(generation_request)
    assert [c.token_ids for c in answer] == [c.token_ids for c in await wide.generate(generation_request)]
    assert max(rows for rows, _ in shapes) == 4


async def test_a_request_is_answered_while_longer_ones_go_on() -> None:
    engine, _, _ = watched()
    long = asyncio.create_task(engine.generate(request((1,), max_generate_length=200)))
    await engine.generate(request((2,), max_generate_length=2))
    assert not long.done()
    assert len((await long)[0].token_ids) == 200


async def test_the_event_loop_goes_on_while_the_model_computes() -> None:
    engine, _, model = watched()
    steps = gate_of_model(model)
    steps.hold(after=3)
    running = asyncio.create_task(engine.generate(request((1,), count=8, max_generate_length=20)))
    await steps.held()  # a forward pass that does not end: on this thread, nothing here would run any more
    await asyncio.sleep(0)
    assert not running.done()
    steps.release()
    assert len(await running) == 8


@pytest.mark.parametrize(("raised", "seen"), [(ZeroDivisionError, ZeroDivisionError), (StopIteration, RuntimeError)])
async def test_a_model_that_fails_fails_every_request_in_the_batch_and_none_hangs(
    raised: type[Exception], seen: type[Exception]
) -> None:
    engine, _, model = watched(max_num_seqs=4)

    def explode(*_: object) -> None:
        raise raised("out of memory")

    hook = model.get_input_embeddings().register_forward_hook(explode)
    requests = [request(p, count=2, max_generate_length=5) for p in prompts(3, 4, 5, 6, 7)]
    answers = await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests), return_exceptions=True), 30)
    assert [type(answer) for answer in answers] == [seen] * 5
    hook.remove()
    (group,) = await asyncio.gather(engine.generate(requests[0]))
    assert [len(c.token_ids) for c in group] == [5, 5]


async def test_requests_made_while_paused_wait_until_resumed() -> None:
    engine, shapes, _ = watched()
    await engine.pause()
    waiting = asyncio.create_task(engine.generate(request((1, 2))))
    await asyncio.sleep(0)
    await engine.pause()  # returns when nothing is running: a request that was let in would be finished
    assert shapes == [] and not waiting.done()
    await engine.resume()
    assert len(await waiting) == 1


async def test_pause_returns_when_what_is_running_has_finished() -> None:
    engine, shapes, model = watched(max_num_seqs=2)
    steps = gate_of_model(model)
    steps.hold(after=1)
    running = asyncio.create_task(engine.generate(request((1,), count=2, max_generate_length=100)))
    queued = asyncio.create_task(engine.generate(request((2,), count=2, max_generate_length=3)))
    await steps.held()
    pausing = asyncio.create_task(engine.pause())
    await asyncio.sleep(0)
    steps.release()
    await pausing
    assert len((await running)[0].token_ids) == 100
    assert len(shapes) == 100
    await engine.pause()
    assert len(shapes) == 100 and not queued.done()
    await engine.resume()
    assert len((await queued)[0].token_ids) == 3


async def test_a_request_that_nobody_waits_for_leaves_the_batch() -> None:
    engine, shapes, model = watched()
    steps = gate_of_model(model)
    steps.hold(after=3)
    forgotten = asyncio.create_task(engine.generate(request((1,), count=8, max_generate_length=250)))
    kept_task = asyncio.create_task(engine.generate(request((2,), max_generate_length=20)))
    await steps.held()
    forgotten.cancel()
    await asyncio.gather(forgotten, return_exceptions=True)
    steps.release()
    assert len((await kept_task)[0].token_ids) == 20
    assert shapes[-15:] == [(1, 1)] * 15
    await engine.pause()


def test_an_engine_outlives_the_event_loop_that_used_it() -> None:
    engine, _, model = watched()
    steps, generation_request = gate_of_model(model), request((1, 2), max_generate_length=50)
    steps.hold(after=3)

    async def give_up() -> asyncio.Task[Any]:
        running = asyncio.create_task(engine.generate(generation_request))
        await steps.held()
        return running

    assert asyncio.run(give_up()).cancelled()
    steps.release()
    (completion,) = asyncio.run(engine.generate(generation_request))
    assert len(completion.token_ids) == 50


async def test_a_closed_engine_refuses_work() -> None:
    engine, _, model = watched()
    steps = gate_of_model(model)
    steps.hold(after=2)
    running = asyncio.create_task(engine.generate(request((1, 2), max_generate_length=5)))
    await steps.held()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    steps.release()
    await closing
    assert [len(completion.token_ids) for completion in await running] == [5]
    with pytest.raises(RunError, match="closed"):
        await engine.generate(request((1, 2)))


def test_a_model_with_a_recurrent_state_is_refused() -> None:
    model = nano_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="a state other than keys and values"):
        TorchEngine(model, nano_tokenizer(), max_num_seqs=1)


async def test_no_gradient_is_kept() -> None:
    engine, _, model = watched()
    await engine.generate(request((1, 2)))
    assert all(p.grad is None and not p.is_inference() for p in model.parameters())
    assert torch.is_grad_enabled()
