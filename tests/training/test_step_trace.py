"""A traced step is written once, with the tensors that it has, when its own weights are about to leave."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.tracking.recording import Computed, SampledBatch
from skyrl.tracking.timing import Clock
from skyrl.training.step_trace import StepTrace
from tests.training.batches import batch_of


class Kept:
    """A sink that keeps what is written."""

    def __init__(self) -> None:
        self.computed: list[Computed] = []
        self.sampled: list[int] = []

    def write_sampled(self, step: int, sampled: SampledBatch) -> None:
        self.sampled.append(step)

    def write_computed(self, computed: Computed) -> None:
        self.computed.append(computed)


class NoRollouts:
    epoch = 0

    def metrics(self) -> dict[str, float]:
        return {}


async def publish(sink: Kept | None, *, shaped: bool, version: int) -> None:
    """The step of version 4 makes the weights of version 5; those of `version` leave."""
    rollouts: Any = NoRollouts()
    trace = StepTrace([] if sink is None else [sink], rollouts, {}, Clock())
    trace.sampled((), 4)
    if shaped:
        trace.keep(batch_of())
    async with trace.before_publishing(version):
        pass


@pytest.mark.parametrize(("shaped", "version", "steps"), [(True, 5, [5]), (True, 4, []), (False, 5, [])])
async def test_a_step_is_written_where_it_has_a_batch_and_its_own_weights_leave(
    shaped: bool, version: int, steps: list[int]
) -> None:
    kept = Kept()
    await publish(kept, shaped=shaped, version=version)
    assert [computed.step for computed in kept.computed] == steps
    assert kept.sampled == [5]


async def test_without_a_sink_nothing_is_written() -> None:
    await publish(None, shaped=True, version=5)


async def test_the_tensors_that_a_batch_has_are_written_in_the_order_in_which_they_come_about() -> None:
    kept = Kept()
    await publish(kept, shaped=True, version=5)
    assert list(kept.computed[0].tensors) == ["input_ids", "loss_mask", "rollout_logprobs", "rewards", "advantages"]
