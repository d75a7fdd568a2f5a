"""Groups sampled ahead of training: the bound on staleness, order, faults, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from attrs import define, field

from skyrl.data.cursor import PromptCursor
from skyrl.errors import RunError
from skyrl.planning.staleness import room_for_groups
from skyrl.rollout.stream import GroupStream, StreamLimits, _StartedGroup
from skyrl.tools.virtual_time import run_in_virtual_time
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(number), messages=(), token_ids=(number,), env_class="gsm8k") for number in range(count)]


def group_of(prompt: Prompt, version: int) -> TrajectoryGroup:
    row = Trajectory(
        prompt_id=prompt.id,
        sample_index=0,
        prompt_ids=prompt.token_ids,
        response_ids=(7, 8),
        loss_mask=(1, 1),
        rollout_logprobs=(-0.1, math.log(1 / 3)),
        weight_versions=(version, version),
        rewards=(TurnReward(token=1, reward=1.0),),
        stop_reason="stop",
        metrics={"length": 2.0},
        timings={"completion": 0.5},
    )
    return TrajectoryGroup(prompt=prompt, trajectories=(row,))


@define
class World:
    """A stream over sampled latencies, trained on by a loop that takes its time; it notes what happens."""

    latency: Callable[[Prompt], float] = lambda prompt: 1.0
    train_seconds: float = 1.0
    batch: int = 4
    staleness: int = 2
    concurrency: int = 100
    queue: int = 1000
    steps: int = 10
    data: int = 400
    accept: Callable[[TrajectoryGroup], bool] = lambda group: True
    begun: list[tuple[str, int, int]] = field(factory=list)
    trained: list[list[str]] = field(factory=list)
    lags: list[int] = field(factory=list)
    most_running: int = 0
    running: int = 0

    async def sample(self, prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        self.begun.append((prompt.id, version, attempt))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.latency(prompt))
        finally:
            self.running -= 1
        return group_of(prompt, version)

    def stream(self) -> GroupStream:
        limits = StreamLimits(
            batch=self.batch,
            staleness=self.staleness,
            concurrency=self.concurrency,
            queue=self.queue,
            total=self.steps * self.batch,
            stall_seconds=100.0,
        )
        cursor = PromptCursor(prompts(self.data), self.batch, seed=0)
        return GroupStream(cursor, self.sample, limits, self.accept)

    async def train(self, stream: GroupStream, first: int = 0, last: int | None = None) -> None:
        for version in range(first, self.steps if last is None else last):
            stream.set_weights_version(version)
            groups = await stream.take(version)
            assert len(groups) == self.batch
            self.trained.append([group.prompt.id for group, _ in groups])
            self.lags += [version - start_version for _, start_version in groups]
            await asyncio.sleep(self.train_seconds)


def run(world: World) -> World:
    async def all_steps() -> None:
        stream = world.stream()
        await world.train(stream)
        await stream.close()

    run_in_virtual_time(all_steps())
    return world


def uneven(prompt: Prompt) -> float:
    """Mostly short, one in twenty very long."""
    draw = Random(prompt.id)
    return draw.uniform(20, 60) if draw.random() < 0.05 else draw.uniform(0.1, 1.0)


@pytest.mark.parametrize(
    ("staleness", "version", "batch", "accepted", "running", "concurrency", "room"),
    [(0, 0, 64, 0, 0, 256, 64), (4, 3, 64, 200, 100, 128, 28), (4, 50, 64, 50 * 64, 0, 256, 256)],
)
def test_room_is_what_areal_computes(
    staleness: int, version: int, batch: int, accepted: int, running: int, concurrency: int, room: int
) -> None:
    result = room_for_groups(
        concurrency=concurrency, running=running, accepted=accepted, version=version, staleness=staleness, batch=batch
    )
    assert result == room


def test_without_staleness_every_batch_is_sampled_by_the_weights_that_it_trains_in_the_order_of_the_data() -> None:
    world = run(World(staleness=0, latency=uneven))
    assert set(world.lags) == {0}
    cursor = PromptCursor(prompts(400), 4, seed=0)
    assert world.trained == [[prompt.id for prompt in cursor.take()] for _ in range(10)]


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_no_group_is_older_than_the_bound_however_long_it_takes(staleness: int) -> None:
    world = run(World(staleness=staleness, latency=uneven, steps=60))
    assert max(world.lags) == staleness
    assert min(world.lags) >= 0


def test_the_oldest_groups_that_are_ready_go_first_and_a_late_one_when_it_would_be_too_old() -> None:
    slow = run(World(staleness=2, latency=lambda prompt: 5.0 if prompt.id == "0" else 0.5, data=40, steps=10))
    order = [name for name, _, _ in slow.begun]
    for batch in slow.trained:
        assert batch == sorted(batch, key=order.index)
    waited = next(index for index, batch in enumerate(slow.trained) if "0" in batch)
    start_version = next(version for name, version, _ in slow.begun if name == "0")
    assert waited == start_version + 2


def test_no_more_groups_run_than_allowed_and_all_of_them_where_there_is_work() -> None:
    assert run(World(staleness=8, concurrency=3)).most_running == 3


def test_a_queue_holds_generation_back() -> None:
    assert run(World(staleness=8, queue=6, train_seconds=50)).most_running == 6


def test_nothing_is_begun_that_no_step_is_left_for() -> None:
    world = run(World(staleness=8, steps=3))
    assert len(world.begun) == 12


def test_every_prompt_of_an_epoch_is_trained_on_once() -> None:
    world = run(World(staleness=4, latency=uneven, data=80, steps=20))
    assert Counter(name for batch in world.trained for name in batch) == Counter(str(number) for number in range(80))


def test_a_refused_group_gives_its_place_to_another_prompt() -> None:
    world = run(World(staleness=1, accept=lambda group: int(group.prompt.id) % 3 != 0))
    assert all(int(name) % 3 for batch in world.trained for name in batch)
    assert len(world.trained) == 10


def test_a_group_that_fails_ends_the_wait_with_its_error() -> None:
    def fail(prompt: Prompt) -> float:
        raise RunError("the engine is gone")

    with pytest.raises(RunError, match="the engine is gone"):
        run(World(latency=fail))


def test_a_batch_that_no_group_ends_for_is_not_waited_for_and_says_what_is_missing() -> None:
    world = World(latency=lambda prompt: 1e9 if prompt.id == "3" else 1.0, data=8, staleness=0)
    with pytest.raises(RunError, match=r"3 of 4 groups are ready, 1 are being sampled.*prompt 3 \(begun 101 s ago"):
        run(world)


def test_a_batch_that_can_never_be_full_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(RunError, match=r"4 groups are ready, a batch has 5"):
        run(World(batch=5, queue=4))


def test_a_prompt_that_comes_again_under_the_same_weights_draws_other_numbers() -> None:
    seen: list[str] = []

    def only_later(group: TrajectoryGroup) -> bool:
        seen.append(group.prompt.id)
        return seen.count(group.prompt.id) > 1

    world = run(World(staleness=0, data=4, steps=1, accept=only_later))
    assert {attempt for _, _, attempt in world.begun} == {0, 1}


@pytest.mark.parametrize("stopped", range(1, 20, 3))
def test_a_stream_that_was_killed_trains_on_what_is_left_and_on_nothing_twice(stopped: int) -> None:
    """80 prompts are one epoch of 20 steps. What the killed session sampled after the checkpoint is lost with it."""

    async def killed() -> tuple[dict[str, Any], World]:
        world = World(staleness=4, latency=uneven, data=80, steps=20)
        stream = world.stream()
        await world.train(stream, 0, stopped)
        state = json.loads(json.dumps(stream.state()))
        await asyncio.sleep(1.0)
        await stream.close()
        return state, world

    async def resumed(state: dict[str, Any]) -> World:
        world = World(staleness=4, latency=uneven, data=80, steps=20)
        stream = world.stream()
        stream.load_state(state)
        await world.train(stream, stopped)
        await stream.close()
        return world

    state, before = run_in_virtual_time(killed())
    after = run_in_virtual_time(resumed(state))
    trained = [name for batch in before.trained + after.trained for name in batch]
    assert Counter(trained) == Counter(str(number) for number in range(80))
    assert max(after.lags) <= 4


def test_a_checkpoint_keeps_finished_groups_as_they_were() -> None:
    async def kept() -> None:
        world = World(staleness=4)
        stream = world.stream()
        await world.train(stream, 0, 3)
        state = json.loads(json.dumps(stream.state()))
        restored = world.stream()
        restored.load_state(state)
        assert [entry.group for entry in restored._started.values()] == [
            entry.group for entry in stream._started.values() if entry.group
        ]
        await stream.close()

    run_in_virtual_time(kept())


def test_a_prompt_that_a_checkpoint_holds_a_group_of_is_drawn_anew_by_the_same_weights() -> None:
    """Two prompts over and over: those that are finished at version 0 come again at version 0 after the start."""

    async def resumed() -> list[tuple[str, int, int]]:
        stream = World(staleness=4, batch=2, data=2, queue=4).stream()
        stream.set_weights_version(0)
        await asyncio.sleep(10)
        state = json.loads(json.dumps(stream.state()))
        await stream.close()
        world = World(staleness=4, batch=2, data=2, queue=6)
        restored = world.stream()
        restored.load_state(state)
        restored.set_weights_version(0)
        await asyncio.sleep(10)
        await restored.close()
        return world.begun

    assert sorted(run_in_virtual_time(resumed())) == [("0", 0, 2), ("1", 0, 2)]


def test_a_group_is_as_new_as_the_last_weights_that_drew_a_token_of_it() -> None:
    [prompt] = prompts(1)
    versions = [_StartedGroup(0, prompt, 1, 0.0, group).newest_version for group in (None, group_of(prompt, 3))]
    assert versions == [1, 3]


def test_a_run_that_goes_back_gives_up_what_later_weights_drew_and_samples_those_prompts_again() -> None:
    """At version 5 the bound lets 12 groups be ahead; those that versions 0 to 2 began are trained on by then."""
    world = World(staleness=2, data=400, steps=10)

    async def there_and_back() -> tuple[list[str], GroupStream]:
        stream = world.stream()
        await world.train(stream, 0, 5)
        stream.set_weights_version(5)
        await asyncio.sleep(10)
        ahead = [entry.prompt.id for entry in stream._sorted_by_age() if entry.newest_version > 2]
        stream.load_state(stream.state())
        await world.train(stream, 2)
        await stream.close()
        return ahead, stream

    ahead, stream = run_in_virtual_time(there_and_back())
    assert len(ahead) == stream.resampled == 12
    assert [name for batch in world.trained[5:8] for name in batch] == ahead
    assert (min(world.lags), max(world.lags)) == (0, 2)
    assert len(world.trained) == 5 + 8
    assert max(Counter(name for batch in world.trained for name in batch).values()) == 1


def test_without_staleness_a_run_goes_back_to_the_version_that_the_engines_hold() -> None:
    """The batch of a step that failed is not trained on; the next one takes its place."""
    world = World(staleness=0, steps=3)

    async def twice() -> None:
        stream = world.stream()
        await world.train(stream, 0, 1)
        stream.set_weights_version(1)
        await stream.take(1)
        stream.load_state(stream.state())
        await world.train(stream, 1)
        await stream.close()

    run_in_virtual_time(twice())
    assert len(world.trained) == 3


def test_a_run_that_goes_on_with_a_smaller_bound_samples_anew_what_is_too_old_for_it() -> None:
    async def longer() -> dict[str, Any]:
        world = World(staleness=4, data=80, steps=20)
        stream = world.stream()
        await world.train(stream, 0, 5)
        await asyncio.sleep(10)
        await stream.close()
        return stream.state()

    async def shorter(state: dict[str, Any]) -> World:
        world = World(staleness=1, data=80, steps=20)
        stream = world.stream()
        stream.load_state(state)
        await world.train(stream, 5)
        await stream.close()
        return world

    after = run_in_virtual_time(shorter(run_in_virtual_time(longer())))
    assert max(after.lags) <= 1
    trained = Counter(name for batch in after.trained for name in batch)
    assert (trained.total(), max(trained.values())) == (60, 1)


def test_a_group_that_is_cancelled_from_outside_is_no_silent_loss() -> None:
    """Only the run may give a group up: any other cancellation is a failure, and heard at once."""

    def cancelled(prompt: Prompt) -> float:
        raise asyncio.CancelledError

    with pytest.raises(RunError, match=r"the sampling of prompt \d+ was cancelled, but not by the run"):
        run(World(latency=cancelled))


def test_a_stream_is_closed_although_a_group_hangs_while_it_cleans_up_and_begins_nothing_meanwhile() -> None:
    started: list[str] = []

    async def stubborn(prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        started.append(prompt.id)
        try:
            await asyncio.sleep(1 if len(started) == 1 else 1e9)
        finally:
            await asyncio.sleep(1e9)
        return group_of(prompt, version)

    async def close() -> float:
        world = World()
        limits = StreamLimits(batch=4, staleness=1, concurrency=4, queue=8, total=40, stall_seconds=1e6)
        stream = GroupStream(PromptCursor(prompts(40), 4, seed=0), stubborn, limits, world.accept)
        stream.set_weights_version(0)
        await asyncio.sleep(10)
        await stream.close()
        assert not stream._tasks
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(close()) == pytest.approx(40.0)
    assert len(started) == 4


def test_groups_that_are_all_refused_are_a_stall_too() -> None:
    with pytest.raises(
        RunError, match=r"0 of 4 groups are ready, 12 .* only \d+, which were refused, have finished in the last 100 s"
    ):
        run(World(accept=lambda group: False))


def test_a_stall_says_who_waits_for_whom() -> None:
    async def stalled() -> None:
        limits = StreamLimits(batch=1, staleness=0, concurrency=4, queue=4, total=4, stall_seconds=5)
        waits = [f"engine-{number} in generate (for 5 s)" for number in range(4)]

        async def never(prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
            await asyncio.sleep(1e9)
            return group_of(prompt, version)

        stream = GroupStream(PromptCursor(prompts(4), 1, seed=0), never, limits, lambda group: True, lambda: waits)
        try:
            await stream.take(0)
        finally:
            await stream.close()

    with pytest.raises(RunError, match=r"who waits for whom: engine-0 in generate \(for 5 s\), .* and 1 more$"):
        run_in_virtual_time(stalled())
