"""How fast calls may begin, on a loop whose time passes only where nothing else happens."""

from __future__ import annotations

import asyncio

import pytest

from skyrl.rollout.env_calls import EnvCalls, Pace
from tests.effects.stage import StageLoop


async def times(pace: Pace, callers: int) -> list[float]:
    """When each of so many callers, which come together, is let through, in seconds from now."""
    loop = asyncio.get_running_loop()
    began, let_through = loop.time(), []

    async def call() -> None:
        await pace()
        let_through.append(round(loop.time() - began, 6))

    await asyncio.gather(*(call() for _ in range(callers)))
    return let_through


def played(work: object) -> list[float]:
    with asyncio.Runner(loop_factory=StageLoop) as runner:
        return runner.run(work)  # type: ignore[arg-type]  # a coroutine of this file


def test_after_a_burst_of_one_second_calls_begin_at_the_rate() -> None:
    assert played(times(Pace(4.0), 8)) == [0, 0, 0, 0, 0.25, 0.5, 0.75, 1.0]


def test_a_rate_below_one_call_per_second_is_kept() -> None:
    assert played(times(Pace(0.5), 3)) == [0, 2.0, 4.0]


def test_without_a_rate_no_call_waits() -> None:
    assert played(times(Pace(None), 3)) == [0, 0, 0]


def test_a_burst_is_allowed_again_after_a_rest() -> None:
    async def twice() -> list[float]:
        pace = Pace(2.0)
        await times(pace, 4)
        await asyncio.sleep(10.0)
        return await times(pace, 3)

    assert played(twice()) == [0, 0, 0.5]


async def test_calls_of_agents_keep_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    class Counted(Pace):
        async def __call__(self) -> None:
            nonlocal count
            count += 1

    calls = EnvCalls(1, None, pace=Counted(1.0))
    assert [(await calls("it", int, "3"))[0] for _ in range(2)] == [3, 3]
    assert count == 2
