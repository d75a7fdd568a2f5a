"""Draws that follow rewards, ahead of training: the same however long groups take, wherever a run is interrupted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from attrs import evolve, frozen

from skyrl.data.cursor import PromptCursor
from skyrl.data.samplers import Pool, Pools, Scored
from skyrl.rollout.stream import GroupStream, StreamLimits
from skyrl.tools.virtual_time import run_in_virtual_time
from skyrl.trajectory import Prompt, TrajectoryGroup, TurnReward
from tests.rollout.test_stream import group_of, prompts

ROWS, BATCH, STEPS = 40, 4, 30


class Logged(Pools):
    """Pools that write down what they draw, by step, over all sessions."""

    def __init__(self, log: dict[int, list[int]]) -> None:
        pools = (Pool("hard", 0.3, 0.2), Pool("normal", 0.7, 1.0), Pool("easy", 1.0, 0.0))
        super().__init__(ROWS, pools, 1.0, 0.0, seed=5)
        self.log, self.observed = log, list[int]()

    def draw(self, count: int, step: int) -> Sequence[int]:
        rows = list(super().draw(count, step))
        assert self.log.setdefault(step, rows) == rows, f"step {step} was drawn before, and otherwise"
        return rows

    def observe(self, group: Scored) -> None:
        super().observe(group)
        self.observed.append(group.row)


def reward_of(prompt: Prompt) -> float:
    return Random(f"reward {prompt.id}").choice([0.0, 0.5, 1.0])


@frozen
class Run:
    """A run over sampled latencies: sessions that end after some of its steps, and continue from their stored state."""

    seed: int
    staleness: int = 2
    concurrency: int = 1000
    refuses: bool = False

    def draws(self, *interrupted: int) -> dict[int, list[int]]:
        log: dict[int, list[int]] = {}
        state = None
        for session, (first, last) in enumerate(zip((0, *interrupted), (*interrupted, STEPS), strict=True)):
            state = run_in_virtual_time(self._session(log, state, first, last, session))
        return log

    async def _session(self, log: dict[int, list[int]], state: Any, first: int, last: int, session: int) -> Any:
        latency = Random(f"{self.seed} {session}")

        async def sample(prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
            await asyncio.sleep(latency.uniform(20, 60) if latency.random() < 0.1 else latency.uniform(0.1, 2))
            group = group_of(prompt, version)
            rewarded = (TurnReward(token=1, reward=reward_of(prompt)),)
            return evolve(group, trajectories=tuple(evolve(row, rewards=rewarded) for row in group.trajectories))

        def accept(group: TrajectoryGroup) -> bool:
            return not self.refuses or reward_of(group.prompt) == 0.5

        rows = prompts(ROWS)
        cursor = PromptCursor(rows, BATCH, seed=0, sampler=Logged(log), lag=self.staleness)
        limits = StreamLimits(
            batch=BATCH,
            staleness=self.staleness,
            concurrency=self.concurrency,
            queue=1000,
            total=STEPS * BATCH,
            stall_seconds=1000.0,
        )
        stream = GroupStream(cursor, sample, limits, accept)
        if state is not None:
            stream.load_state(json.loads(state))
        for version in range(first, last):
            stream.set_weights_version(version)
            await stream.take(version)
            await asyncio.sleep(1.0)
        kept = json.dumps(stream.state())
        await asyncio.sleep(latency.uniform(0, 30))  # what happens after the checkpoint is lost
        await stream.close()
        return kept


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(("staleness", "concurrency"), [(0, 1000), (1, 1000), (2, 5), (4, 1000)])
def test_draws_do_not_depend_on_how_long_groups_take(staleness: int, concurrency: int, refuses: bool) -> None:
    runs = [Run(seed, staleness, concurrency, refuses).draws() for seed in range(4)]
    together = min(map(len, runs))
    assert together >= STEPS
    assert len({json.dumps({step: run[step] for step in range(together)}) for run in runs}) == 1


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_is_interrupted_at_twenty_moments_draws_what_an_undisturbed_one_draws(
    staleness: int, refuses: bool
) -> None:
    undisturbed = Run(0, staleness, refuses=refuses).draws()
    moments = sorted(Random(staleness).sample(range(1, STEPS), 20))
    interrupted = Run(1, staleness, refuses=refuses).draws(*moments)
    together = min(len(undisturbed), len(interrupted))
    assert together >= STEPS
    assert [interrupted[step] for step in range(together)] == [undisturbed[step] for step in range(together)]


def test_rewards_arrive_in_the_order_of_the_draws_and_change_what_is_drawn() -> None:
    log: dict[int, list[int]] = {}
    sampler = Logged(log)
    cursor = PromptCursor(prompts(ROWS), BATCH, seed=0, sampler=sampler, lag=1)
    drawn = [int(prompt.id) for _ in range(2) for prompt in cursor.take()]
    assert not cursor.is_ready
    for number in reversed(range(8)):
        cursor.observe(number, (0.5,))
    assert cursor.is_ready and sampler.observed == []
    cursor.take()
    assert sampler.observed == drawn[:4]  # the others are within the lag
    cursor.observe(2, (1.0,))  # a group that is sampled again tells nothing new
    assert cursor.state()["draws"][0] == (4, drawn[4], True, (0.5,))


def test_a_group_without_rewards_is_not_waited_for() -> None:
    cursor = PromptCursor(prompts(ROWS), BATCH, seed=0, sampler=Logged({}), lag=0)
    cursor.take()
    for number in range(4):
        cursor.observe(number, () if number == 1 else (1.0,))
    assert cursor.is_ready
