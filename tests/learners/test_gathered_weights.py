"""The whole weights of a learner that is spread over ranks, as engines and checkpoints get them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyrl.learners.fsdp2 import prefetched
from tests.learners.spreading import CUT_BY_DEEPSPEED, STEPS, WAYS, Spread, copies, mini_batch, weights_of

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.long
async def test_weights_are_gathered_between_many_updates(spread: Spread) -> None:
    """Gathers in the background corrupted the heap of a rank, which died after a few dozen of these rounds."""
    learner = spread.policy({}, 2)
    for step in range(200):
        await learner.update(mini_batch(step % STEPS))
        await weights_of(learner)


async def test_all_ranks_are_free_again_when_a_consumer_of_the_weights_fails(spread: Spread) -> None:
    learner = spread.policy(*WAYS["FSDP2 on 2 ranks"])
    with pytest.raises(ZeroDivisionError):
        await learner.export_weights(fail_at_the_second)
    assert len(await weights_of(learner)) == len(await learner.shapes())


def fail_at_the_second(weights: Any) -> None:
    next(weights)
    next(weights)
    raise ZeroDivisionError


@pytest.mark.long
async def test_the_shapes_are_those_of_what_is_streamed(spread: Spread) -> None:
    for name in ("FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks", CUT_BY_DEEPSPEED):
        learner = spread.policy(*WAYS[name])
        streamed = await weights_of(learner)
        expected = [(name, tuple(weight.shape)) for name, weight in streamed.items()]
        assert await learner.shapes() == expected


@pytest.mark.long
async def test_weights_that_are_rounded_before_they_travel_are_those_that_are_rounded_after(spread: Spread) -> None:
    for name in ("FSDP2, 2 ranks cut matrices", "FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks", CUT_BY_DEEPSPEED):
        learner = spread.policy(*WAYS[name])
        early = await learner.export_weights(copies, dtype="bfloat16")
        for weight_name, weight in (await weights_of(learner)).items():
            assert torch.equal(early[weight_name], weight.to(torch.bfloat16))


def test_weights_are_on_their_way_as_far_as_the_bytes_go() -> None:
    consumed: list[int] = []

    def items() -> Iterator[int]:
        for size in (3, 4, 2, 9, 1):
            consumed.append(size)
            yield size

    flying = prefetched(items(), lambda size: size, 6)
    seen = [(item, list(consumed)) for item in flying]
    assert [item for item, _ in seen] == [3, 4, 2, 9, 1]
    assert seen[0] == (3, [3, 4])  # the second is on its way while the first is used
    assert seen[1] == (4, [3, 4, 2, 9])
