"""Laws of streamed rollouts, over random schedules: bounded, fair, and nothing lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from skyrl.data.cursor import PromptCursor
from skyrl.errors import RewardError, RunError
from skyrl.rollout.stream import GroupStream, StreamLimits
from skyrl.tools.virtual_time import run_in_virtual_time
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


@frozen
class Schedule:
    """How long everything takes, and what goes wrong."""

    limits: StreamLimits
    steps: int
    prompts: int
    seed: int
    refused: float
    """Share of the groups that are not accepted."""

    slow: float
    """Share of the groups that take 100 times as long."""

    training: float
    """Seconds of a training step; a group takes about one."""


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    batch, steps = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    limits = StreamLimits(
        batch=batch,
        staleness=draw(st.integers(0, 4)),
        concurrency=draw(st.integers(1, 30)),
        queue=batch + draw(st.integers(0, 20)),
        total=batch * steps,
        stall_seconds=1e6,
    )
    return Schedule(
        limits,
        steps,
        prompts=batch * draw(st.integers(1, 10)),
        seed=draw(st.integers(0, 2**32)),
        refused=draw(st.sampled_from([0.0, 0.0, 0.2, 0.7])),
        slow=draw(st.sampled_from([0.0, 0.05, 0.5])),
        training=draw(st.sampled_from([0.0, 0.5, 5.0])),
    )


def group_of(prompt: Prompt, version: int) -> TrajectoryGroup:
    row = Trajectory(
        prompt_id=prompt.id,
        sample_index=0,
        prompt_ids=prompt.token_ids,
        response_ids=(1,),
        loss_mask=(1,),
        rollout_logprobs=(0.0,),
        weight_versions=(version,),
        rewards=(TurnReward(token=0, reward=0.0),),
        stop_reason="stop",
    )
    return TrajectoryGroup(prompt=prompt, trajectories=(row,))


class Run:
    """A stream, and a loop that trains on it and counts."""

    def __init__(self, schedule: Schedule, fails_at: int | None = None) -> None:
        self.schedule, self.fails_at = schedule, fails_at
        self.random = Random(schedule.seed)
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.oldest = 0
        names = range(schedule.prompts)
        self.data = [Prompt(id=str(name), messages=(), token_ids=(name,), env_class="gsm8k") for name in names]
        cursor = PromptCursor(self.data, schedule.limits.batch, seed=schedule.seed % 97)
        self.stream = GroupStream(cursor, self.sample, schedule.limits, self.accept)
        self.running = 0

    async def sample(self, prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        limits, accepted = self.schedule.limits, self.trained.total() + self.stream.waiting
        self.begun[prompt.id] += 1
        self.running += 1
        assert self.running <= limits.concurrency
        assert self.running + self.stream.waiting <= limits.queue
        assert accepted + self.running <= (limits.staleness + version + 1) * limits.batch
        assert accepted + self.running <= limits.total
        if self.begun.total() == self.fails_at:
            raise RewardError("planted")
        slow = self.random.random() < self.schedule.slow
        await asyncio.sleep(self.random.expovariate(0.01 if slow else 1.0))
        self.running -= 1
        self.ended[prompt.id] += 1
        return group_of(prompt, version)

    def accept(self, group: TrajectoryGroup) -> bool:
        accepted = self.random.random() >= self.schedule.refused
        self.refused[group.prompt.id] += not accepted
        return accepted

    async def train(self) -> None:
        for version in range(self.schedule.steps):
            self.stream.set_weights_version(version)
            batch = await self.stream.take(version)
            assert len(batch) == self.schedule.limits.batch
            self.trained.update(group.prompt.id for group, _ in batch)
            self.oldest = max([self.oldest, *(version - started for _, started in batch)])
            await asyncio.sleep(self.schedule.training)
        await self.stream.close()


@given(schedules())
def test_every_schedule_ends_within_its_bounds_and_nothing_is_lost_or_doubled(schedule: Schedule) -> None:
    run = Run(schedule)
    run_in_virtual_time(run.train())
    assert run.oldest <= schedule.limits.staleness
    assert run.trained.total() == schedule.steps * schedule.limits.batch
    assert run.begun == run.ended, "no group is given up"
    assert run.trained + run.refused == run.ended, "whatever was sampled was trained on or refused, once"


@given(schedules(), st.integers(1, 40))
def test_a_group_that_fails_is_heard_of_at_once_or_was_never_needed(schedule: Schedule, fails_at: int) -> None:
    run = Run(schedule, fails_at=fails_at)
    heard = ""
    try:
        run_in_virtual_time(run.train())
    except RunError as error:
        heard = str(error)
    assert heard == ("planted" if run.begun.total() >= fails_at else "")


@given(schedules(), st.integers(0, 7))
def test_a_resumed_stream_trains_on_what_the_killed_one_did_not(schedule: Schedule, stop: int) -> None:
    stop = min(stop, schedule.steps)
    first, second = Run(schedule), Run(schedule)

    async def killed() -> dict[str, object]:
        for version in range(stop):
            first.stream.set_weights_version(version)
            first.trained.update(group.prompt.id for group, _ in await first.stream.take(version))
            await asyncio.sleep(schedule.training)
        state = first.stream.state()
        await first.stream.close()
        return state

    state = run_in_virtual_time(killed())
    refused = first.refused.total()

    async def resumed() -> None:
        second.stream.load_state(state)
        second.trained.update(first.trained)
        for version in range(stop, schedule.steps):
            second.stream.set_weights_version(version)
            second.trained.update(group.prompt.id for group, _ in await second.stream.take(version))
        await second.stream.close()

    run_in_virtual_time(resumed())
    counts = second.trained + second.refused + first.refused
    whole_epochs, rest = divmod(counts.total(), schedule.prompts)
    assert second.trained.total() == schedule.steps * schedule.limits.batch
    assert all(whole_epochs <= count <= whole_epochs + (rest > 0) for count in counts.values()), (counts, refused)


@pytest.mark.long
def test_ten_thousand_schedules() -> None:
    draw = Random(0)
    for seed in range(10_000):
        batch, steps = draw.randint(1, 6), draw.randint(1, 8)
        limits = StreamLimits(
            batch=batch,
            staleness=draw.randint(0, 8),
            concurrency=draw.randint(1, 40),
            queue=batch + draw.randint(0, 40),
            total=batch * steps,
            stall_seconds=1e6,
        )
        schedule = Schedule(
            limits,
            steps,
            prompts=batch * draw.randint(1, 10),
            seed=seed,
            refused=draw.choice([0.0, 0.2, 0.7]),
            slow=draw.choice([0.0, 0.05, 0.5]),
            training=draw.choice([0.0, 0.5, 5.0]),
        )
        run = Run(schedule)
        run_in_virtual_time(run.train())
        assert run.oldest <= limits.staleness
        assert run.trained + run.refused == run.ended == run.begun
