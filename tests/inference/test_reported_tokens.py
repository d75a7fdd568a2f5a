"""Tokens that an engine reports while it draws them."""

from __future__ import annotations

import asyncio
import threading

from attrs import evolve

from skyrl.inference.engine import NewTokens
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.vllm.backend import reporter
from tests.inference.nano import nano_model, nano_tokenizer, request


def together(reported: list[NewTokens]) -> dict[int, tuple[int, ...]]:
    """The tokens of each sample, which come in order."""
    tokens_by_index: dict[int, tuple[int, ...]] = {}
    for new in reported:
        before = tokens_by_index.get(new.index, ())
        assert new.start == len(before)
        tokens_by_index[new.index] = before + new.token_ids
    return tokens_by_index


async def test_every_sample_of_a_request_reports_all_of_its_tokens_once() -> None:
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=2)  # three samples are two jobs
    reported: list[NewTokens] = []
    drawn = await engine.generate(evolve(request((1, 2, 3), count=3), on_tokens=reported.append))
    silent = await engine.generate(request((1, 2, 3), count=3))
    await engine.close()
    assert together(reported) == {index: completion.token_ids for index, completion in enumerate(drawn)}
    assert [completion.token_ids for completion in drawn] == [completion.token_ids for completion in silent]


async def test_a_sample_that_is_computed_anew_after_a_pause_reports_no_token_twice() -> None:
    engine, loop = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=2), asyncio.get_running_loop()
    reported: list[NewTokens] = []
    third, gate = asyncio.Event(), threading.Event()

    def hold_behind_the_third(new: NewTokens) -> None:
        reported.append(new)
        if new.start == 2:
            loop.call_soon_threadsafe(third.set)
            assert gate.wait(60)

    drawing = asyncio.ensure_future(engine.generate(evolve(request((1, 2, 3)), on_tokens=hold_behind_the_third)))
    await asyncio.wait_for(third.wait(), 60)
    pausing = asyncio.ensure_future(engine.pause("recompute"))
    await asyncio.sleep(0)
    gate.set()
    await pausing
    assert len(reported) == 3
    await engine.resume()
    (drawn,) = await drawing
    await engine.close()
    assert together(reported) == {0: drawn.token_ids}
    assert len(drawn.token_ids) > 3


def test_all_tokens_so_far_are_reported_as_the_new_ones_among_them() -> None:
    reported: list[NewTokens] = []
    heard = reporter(reported.append, 1)
    for so_far in ((5,), (5, 6, 7), (5, 6, 7)):
        heard(so_far)
    assert together(reported) == {1: (5, 6, 7)}
    assert len(reported) == 2
