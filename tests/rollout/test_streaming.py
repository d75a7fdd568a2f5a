"""Rollouts that continue while the trainer trains: their refusals, position, measures and masks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from attrs import define, evolve, field

from skyrl.config import AlgorithmConfig, DynamicSamplingConfig, GeneratorConfig
from skyrl.data.cursor import PromptCursor
from skyrl.errors import RunError
from skyrl.rollout.attempts import FailureTally
from skyrl.rollout.stream import GroupStream, StreamingRollouts, StreamLimits
from skyrl.tools.virtual_time import run_in_virtual_time
from skyrl.trajectory import Prompt, TokenRow, TrajectoryGroup
from tests.rollout.scripted import trajectory
from tests.rollout.test_stream import group_of, prompts


@define
class Sampler:
    """A generator and its session: every group takes a second and has these rewards."""

    rewards: tuple[float, ...] = (1.0, 0.0)
    versions: tuple[tuple[int, ...], ...] = ()
    """Weights that drew the tokens of each row of a trajectory, the earlier ones first; none: rows of one token."""

    tally: FailureTally = field(factory=lambda: FailureTally(100, 1.0))

    def session(self, **settings: Any) -> Any:
        return self

    async def group(self, prompt: Prompt, *, weight_version: int, attempt: int) -> TrajectoryGroup:
        await asyncio.sleep(1.0)
        rows = [trajectory(reward, index) for index, reward in enumerate(self.rewards)]
        if self.versions:
            *earlier, last = [drawn_by(version) for version in self.versions]
            fields = {name: getattr(last, name) for name in ("response_ids", "loss_mask", "rollout_logprobs")}
            rows = [evolve(row, earlier=tuple(earlier), weight_versions=last.weight_versions, **fields) for row in rows]
        return TrajectoryGroup(prompt=prompt, trajectories=tuple(rows))


def drawn_by(versions: tuple[int, ...]) -> TokenRow:
    count = len(versions)
    return TokenRow(
        prompt_ids=(1,),
        response_ids=(2,) * count,
        loss_mask=(1,) * count,
        rollout_logprobs=(-1.0,) * count,
        weight_versions=versions,
        rewards=(),
    )


def rollouts(sampler: Any, count: int = 4, *, mask: bool = False, **algorithm: Any) -> StreamingRollouts:
    """In turns, 2 groups in a batch and 2 batches in the run."""
    limits = StreamLimits(batch=2, staleness=0, concurrency=2, queue=2, total=4, stall_seconds=100.0)
    rows = prompts(count)
    settings = AlgorithmConfig(**algorithm)
    cursor = PromptCursor(rows, 2, seed=0)
    return StreamingRollouts(cursor, sampler, GeneratorConfig(), settings, limits, mask_older_tokens=mask)


async def train(source: StreamingRollouts, *versions: int) -> list[str]:
    """Prompts of the batches for the updates of these versions."""
    names: list[str] = []
    for version in versions:
        source.set_weights_version(version)
        names += [group.prompt.id for group in await source.next_batch(version)]
    return names


def test_dynamic_sampling_gives_up_after_as_many_groups_as_its_batches_have() -> None:
    """2 batches of 2 groups are 4 groups."""
    source = rollouts(
        Sampler(rewards=(1.0, 1.0)), dynamic_sampling=DynamicSamplingConfig(type="filter", max_sample_batches=2)
    )
    with pytest.raises(RunError, match="dynamic sampling refused 4 groups since the last batch"):
        run_in_virtual_time(train(source, 0))


def test_an_epoch_is_over_when_all_its_batches_are_trained_on() -> None:
    """4 prompts are an epoch of 2 batches."""

    async def epochs() -> list[int]:
        source = rollouts(Sampler())
        epochs = [source.epoch]
        for version in (0, 1):
            await train(source, version)
            epochs.append(source.epoch)
        return epochs

    assert run_in_virtual_time(epochs()) == [0, 0, 1]


def test_prompts_at_the_end_of_an_epoch_that_fill_no_batch_are_counted_beside_the_measures() -> None:
    """5 prompts are 2 batches, and 1 is left out."""
    source = rollouts(Sampler(), count=5)
    run_in_virtual_time(train(source, 0, 1))
    metrics = source.metrics()
    assert (metrics["data/prompts_left_out"], metrics["async/staleness_max"]) == (1, 0)


def test_a_run_that_was_synchronous_continues_with_the_prompts_that_it_had_not_taken() -> None:
    before = PromptCursor(prompts(4), 2, seed=0)
    ids = [prompt.id for prompt in before.take()]
    source = rollouts(Sampler())
    source.load_state(before.state())
    rest = run_in_virtual_time(train(source, 1))
    assert sorted(ids + rest) == ["0", "1", "2", "3"]
    assert source.epoch == 1


def test_a_run_continues_where_its_own_state_was_taken() -> None:
    before, after = rollouts(Sampler()), rollouts(Sampler())
    ids = run_in_virtual_time(train(before, 0))
    after.load_state(before.state())
    assert sorted(ids + run_in_virtual_time(train(after, 1))) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("mask", "trained"), [(True, [(0,), (0, 1)]), (False, [(1,), (1, 1)])])
def test_tokens_of_older_weights_can_be_left_out_of_the_loss(mask: bool, trained: list[tuple[int, ...]]) -> None:
    """The last token of the last row is of version 1, the others of version 0."""

    async def first() -> TrajectoryGroup:
        source = rollouts(Sampler(versions=((0,), (0, 1))), mask=mask)
        source.set_weights_version(0)
        return (await source.next_batch(0))[0]

    group = run_in_virtual_time(first())
    assert [step.loss_mask for step in group.trajectories[0].token_rows] == trained


@pytest.mark.parametrize(("versions", "several"), [(((0,), (0, 0)), 0), (((0,), (0, 1)), 4)])
def test_answers_that_weights_of_several_versions_drew_are_counted(
    versions: tuple[tuple[int, ...], ...], several: int
) -> None:
    """Two groups of two answers."""

    async def measured() -> float:
        source = rollouts(Sampler(versions=versions))
        source.set_weights_version(0)
        await source.next_batch(0)
        return source.metrics()["async/trajectories_of_several_versions"]

    assert run_in_virtual_time(measured()) == several


def test_a_stream_that_is_closed_begins_no_group_in_the_place_of_one_that_ends() -> None:
    started: list[str] = []

    async def ends_when_cancelled(prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        started.append(prompt.id)
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            return group_of(prompt, version)
        raise AssertionError("nobody waits so long")

    async def close() -> None:
        limits = StreamLimits(batch=4, staleness=1, concurrency=4, queue=8, total=40, stall_seconds=1e6)
        cursor = PromptCursor(prompts(40), 4, seed=0)
        stream = GroupStream(cursor, ends_when_cancelled, limits, lambda group: True)
        stream.set_weights_version(0)
        await asyncio.sleep(1.0)
        await stream.close()

    run_in_virtual_time(close())
    assert len(started) == 4
