"""A session on a clock that jumps: what waits for what, what is given up, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from attrs import define, field

from skyrl.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
from skyrl.envs import Env, EnvStep, register
from skyrl.errors import RewardError, RunError
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.rollout.attempts import FailureTally
from skyrl.rollout.env_calls import EpisodeError
from skyrl.rollout.episode import EpisodeContext
from skyrl.rollout.sampling_session import SamplingSession
from skyrl.tools.virtual_time import run_in_virtual_time
from skyrl.trajectory import Failure, Prompt, TrajectoryGroup

FAILURE = Failure(kind="raised", reason="the grader broke")


class Pays(Env):
    closed = 0

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=1.0, done=True)

    def close(self) -> None:
        Pays.closed += 1


register("tests-pays", Pays)


@define
class World:
    """An engine and environments that take the seconds that are given for a prompt; it notes what happens."""

    engine: Mapping[str, float] = field(factory=dict)
    begins: list[float] = field(factory=list)
    """Seconds that the environments take to begin, in the order of their samples; those without take none."""

    fails: int = 0
    """Answers that cannot be judged, of the first ones."""

    lost: bool = False
    """Whether the engine is gone."""

    seen: list[str] = field(factory=list)
    keys: list[SampleKey] = field(factory=list)

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        if self.lost:
            raise RunError("the engine is gone")
        name = request.keys[0].prompt_id
        await asyncio.sleep(self.engine.get(name, 0.0))
        self.seen.append(f"sampled {name}")
        self.keys += request.keys
        answer = Completion(token_ids=(7,), text="a", logprobs=(-0.1,), weight_versions=(0,), stop_reason="stop")
        return (answer,) * len(request.keys)

    async def call(self, who: str, function: Callable[..., Any], *args: object) -> tuple[Any, float]:
        if "starting on" in who and self.begins:
            await asyncio.sleep(self.begins.pop(0))
        if "judging" in who:
            self.seen.append(f"judged {who.split('prompt ')[1][0]}")
            self.fails -= 1
            if self.fails >= 0:
                raise EpisodeError(FAILURE)
        return function(*args), 0.0

    def session(self, *, samples: int = 1, together: int | None = None, tally: FailureTally | None = None) -> Any:
        duck: Any = self
        config, nothing = GeneratorConfig(), duck
        context = EpisodeContext(
            config=config, sampling=SamplingParams(), client=duck, tokenizer=nothing, chat=nothing, call=duck.call
        )
        return SamplingSession(
            context,
            SkyRLGymConfig(max_attempts=1),
            tally or FailureTally(100, 1.0),
            SampleKey(run_seed=0, weight_version=0, prompt_id="", sample_index=0, purpose="train"),
            samples_per_prompt=samples,
            user_env_class=None,
            together=together,
        )


def prompt(name: str) -> Prompt:
    return Prompt(id=name, messages=(), token_ids=(1,), env_class="tests-pays")


def test_groups_that_are_sampled_together_are_judged_when_the_last_of_them_is_sampled() -> None:
    world = World(engine={"a": 0.0, "b": 9.0})

    async def both() -> None:
        session = world.session(together=2)
        await asyncio.gather(*(session.group(prompt(name), weight_version=0) for name in "ab"))

    run_in_virtual_time(both())
    assert world.seen[:2] == ["sampled a", "sampled b"]
    assert sorted(world.seen[2:]) == ["judged a", "judged b"]


def test_a_group_that_is_given_up_waits_for_no_environment_that_is_beginning() -> None:
    async def given_up() -> float:
        session = World(begins=[1000.0]).session(together=1)
        group = asyncio.ensure_future(session.group(prompt("a"), weight_version=0))
        await asyncio.sleep(1.0)
        group.cancel()
        await asyncio.wait([group])
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(given_up()) == 1.0


def test_the_environments_of_a_group_that_is_given_up_while_the_engine_samples_are_closed() -> None:
    async def closed() -> int:
        before = Pays.closed
        session = World(engine={"a": 1000.0}).session(samples=3)
        group = asyncio.ensure_future(session.group(prompt("a"), weight_version=0))
        await asyncio.sleep(1.0)
        group.cancel()
        await asyncio.wait([group])
        return Pays.closed - before

    assert run_in_virtual_time(closed()) == 3


def test_a_group_that_is_given_up_ends_after_the_environments_that_were_beginning() -> None:
    class Lingers(World):
        async def call(self, who: str, function: Callable[..., Any], *args: object) -> tuple[Any, float]:
            try:
                return await super().call(who, function, *args)
            finally:
                await asyncio.sleep(5.0)
                self.seen.append("gone")

    world = Lingers(begins=[1000.0])

    async def given_up() -> list[str]:
        group = asyncio.ensure_future(world.session(together=1).group(prompt("a"), weight_version=0))
        await asyncio.sleep(1.0)
        group.cancel()
        await asyncio.wait([group])
        return list(world.seen)

    assert run_in_virtual_time(given_up()) == ["gone"]


def test_an_engine_that_fails_is_what_is_raised_while_another_environment_is_beginning() -> None:
    with pytest.raises(RunError, match="the engine is gone"):
        run_in_virtual_time(
            World(begins=[0.0, 1000.0], lost=True).session(samples=2).group(prompt("a"), weight_version=0)
        )


def test_failures_are_a_share_of_the_samples_that_a_session_draws() -> None:
    """A batch of 1 sample could bear 1 failure; 4 samples, half of which may fail, bear 2."""
    tally = FailureTally(1, 0.5)
    session = World(fails=2).session(samples=4, tally=tally)
    group: TrajectoryGroup = run_in_virtual_time(session.group(prompt("a"), weight_version=0))
    assert [row.failed for row in group.trajectories].count(True) == 2


def test_samples_that_are_finished_are_no_part_of_the_next_batch() -> None:
    """The 4 samples are drawn: the next batch has its 1 sample, which bears 1 failure and not 2."""
    tally = FailureTally(1, 0.5)
    run_in_virtual_time(World().session(samples=4, tally=tally).group(prompt("a"), weight_version=0))
    tally.reset()
    tally.count(FAILURE)
    with pytest.raises(RewardError, match="failed 2 times among 1 samples"):
        tally.count(FAILURE)


def test_a_group_is_the_first_draw_of_its_prompt_unless_it_is_asked_for_another() -> None:
    world = World()
    run_in_virtual_time(world.session().group(prompt("a"), weight_version=5))
    run_in_virtual_time(world.session().group(prompt("a"), weight_version=5, attempt=2, occurrence=3))
    assert [(key.weight_version, key.attempt, key.occurrence) for key in world.keys] == [(5, 0, 0), (5, 2, 3)]
