"""Attempts at a sample: each is closed, has the time to close, and draws numbers of its own."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import SkyRLGymConfig
from skyrl.envs import Env, EnvStep, register
from skyrl.inference.engine import Completion
from skyrl.trajectory import Prompt
from tests.rollout.chats import Says, chat_tokenizer, generator, play, prompt

TOKENIZER = chat_tokenizer()


class Once(Env):
    """Fails in the first attempt, and counts how many environments were closed."""

    closed = 0
    begun = 0

    def __init__(self, extras: Any) -> None:
        super().__init__(extras)
        Once.begun += 1

    def step(self, action: str) -> EnvStep:
        if Once.begun == 1:
            raise ValueError("no")
        return EnvStep(reward=1.0, done=True)

    def close(self) -> None:
        Once.closed += 1


register("tests-once", Once)


@pytest.fixture
def once() -> Prompt:
    Once.begun = Once.closed = 0
    return prompt(TOKENIZER, "tests-once")


class Again(Says):
    """Answers, and may fail where a sample is drawn again."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__(TOKENIZER, ["a"])
        self._fails = fails

    async def generate(self, request: Any) -> tuple[Completion, ...]:
        if self._fails and request.keys[0].attempt:
            raise ZeroDivisionError("the engine broke")
        return await super().generate(request)


async def test_an_attempt_that_the_engine_fails_is_closed_like_the_others(once: Prompt) -> None:
    gym = SkyRLGymConfig(max_failed_share=1.0, max_attempts=2)
    with pytest.raises(ZeroDivisionError, match="the engine broke"):
        await play(generator(Again(fails=True), TOKENIZER, gym), once)
    assert (Once.begun, Once.closed) == (2, 2)


async def test_an_environment_may_take_its_time_to_close_after_the_sample_is_over(
    once: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.rollout.attempts.CLOSING_SECONDS", 3600.0)
    gym = SkyRLGymConfig(max_failed_share=1.0, max_attempts=2, trajectory_timeout_seconds=600.0)
    (group,) = await play(generator(Again(fails=False), TOKENIZER, gym), once)
    assert [failure.kind for failure in group.trajectories[0].failures] == ["raised"]


async def test_a_sample_that_is_drawn_again_has_numbers_that_no_attempt_at_a_batch_has(once: Prompt) -> None:
    """An attempt at a batch is one of `max_sample_batches`: dozens."""
    engine = Again(fails=False)
    await play(generator(engine, TOKENIZER, SkyRLGymConfig(max_failed_share=1.0, max_attempts=2)), once)
    first, second = (request.keys[0].attempt for request in engine.requests)
    assert first == 0
    assert second >= 10_000
