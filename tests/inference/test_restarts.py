"""Engines that are lost and started again: when, how often, and what they may do before they have weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.adapters import shared
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.pool.restarts import EngineRestarts
from skyrl.weight_sync.replacement_sync import ReplacementSync
from tests.inference.nano import request
from tests.inference.test_client import SlowEngine, asked_of, weights


class Starts:
    """What starts engines: it is told what comes of each start, and remembers pauses and numbers."""

    def __init__(self, *outcomes: SlowEngine | ProcessError) -> None:
        self.outcomes = list(outcomes)
        self.pauses: list[float] = []
        self.numbers: list[int] = []
        self.restarts = EngineRestarts(self._start, most=3, backoff=5.0, sleep=self._pause)

    async def ended(self) -> None:
        """Returns when nothing is being started."""
        await asyncio.gather(*self.restarts._tasks)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def _start(self, number: int) -> InferenceEngine:
        self.numbers.append(number)
        outcome: Any = self.outcomes.pop(0)
        if isinstance(outcome, ProcessError):
            raise outcome
        engine: InferenceEngine = outcome
        return engine


def client(starts: Starts, *engines: Any) -> InferenceEngineClient:
    unused: Any = None
    return InferenceEngineClient(
        list(engines), unused, "a/model", SkyRLLoraConfig(), InferenceEngineConfig(), restarts=starts.restarts
    )


def names(door: InferenceEngineClient) -> list[str]:
    """Names of the engines in service."""
    serving: list[Any] = list(door.in_service)
    return [engine.name for engine in serving]


async def lost(door: InferenceEngineClient, engine: SlowEngine, *others: SlowEngine) -> None:
    """The engine dies while it draws."""
    tasks = await asked_of(door, *((str(number), 1) for number in range(1 + len(others))))
    engine.fault = ProcessError("it died")
    for each in (engine, *others):
        each.go.set()
    await asyncio.gather(*tasks)


async def publish(door: InferenceEngineClient, version: int) -> None:
    """New weights, as `WeightSync` brings them."""
    await door.pause()
    await door.admit_started()
    await door.load_weights([weights(f"for {n}") for n in range(len(door.in_service))], version)
    await door.resume()


async def test_an_engine_that_died_serves_again_with_the_next_weights() -> None:
    a, b, again = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")
    starts = Starts(again)
    door = client(starts, a, b)
    await lost(door, a, b)
    await starts.ended()
    assert names(door) == ["b"]  # it is there, and holds old weights
    assert again.events == []
    await publish(door, version=1)
    assert names(door) == ["again", "b"]
    assert (again.weights, b.weights) == (["for 0"], ["for 1"])
    assert again.events == ["pause", "resume"]
    assert door.metrics == {
        "inference/engines_in_service": 2,
        "inference/engines_lost": 0,
        "inference/engine_restarts": 1,
    }


async def test_pauses_grow_and_an_engine_is_started_only_so_often() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    starts = Starts(*(ProcessError("no room") for _ in range(3)))
    door = client(starts, a, b)
    await lost(door, a, b)
    await starts.ended()
    assert (starts.pauses, starts.numbers) == ([5.0, 10.0, 20.0], [0, 0, 0])
    await publish(door, version=1)
    assert names(door) == ["b"]


async def test_the_number_of_restarts_holds_for_the_whole_run() -> None:
    b = SlowEngine("b")
    engines = [SlowEngine(str(number)) for number in range(4)]
    starts = Starts(*engines[1:])
    door = client(starts, engines[0], b)
    for version, engine in enumerate(engines, 1):
        await lost(door, engine, b)
        await starts.ended()
        await publish(door, version)
    assert starts.numbers == [0, 0, 0]
    assert names(door) == ["b"]


async def test_an_engine_without_whole_weights_is_started_again() -> None:
    a, b, again = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")
    starts = Starts(again)
    door = client(starts, a, b)
    a.fault = WeightSyncError("bytes were changed")
    a.pause = b.pause  # type: ignore[method-assign]  # only the weights do not get through
    await publish(door, version=1)
    await starts.ended()
    assert names(door) == ["b"]
    await publish(door, version=2)
    assert names(door) == ["again", "b"]


async def test_one_that_dies_again_before_it_serves_is_started_once_more() -> None:
    a, b, first, second = (SlowEngine(name) for name in ("a", "b", "first", "second"))
    starts = Starts(first, second)
    door = client(starts, a, b)
    await lost(door, a, b)
    await starts.ended()
    first.fault = ProcessError("it died again")
    await publish(door, version=1)
    await starts.ended()
    await publish(door, version=2)
    assert names(door) == ["second", "b"]


@pytest.mark.parametrize("waits", [lambda: asyncio.Event().wait(), lambda: asyncio.sleep(0)])
async def test_the_end_of_a_run_waits_for_no_start_and_closes_what_nobody_took(waits: Callable[[], Any]) -> None:
    a, b, again = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")

    async def start(number: int) -> InferenceEngine:
        await waits()
        engine: Any = again
        started: InferenceEngine = engine
        return started

    restarts = EngineRestarts(start, most=1, backoff=0.0, sleep=lambda seconds: asyncio.sleep(0))
    unused: Any = None
    contract: list[Any] = [a, b]
    door = InferenceEngineClient(
        contract, unused, "a/model", SkyRLLoraConfig(), InferenceEngineConfig(), restarts=restarts
    )
    await lost(door, a, b)
    for _ in range(5):
        await asyncio.sleep(0)
    await door.close()
    assert again.events in ([], ["close"])
    assert restarts.take() == []


async def test_requests_wait_for_the_engine_that_takes_the_place_of_the_last() -> None:
    a, again = SlowEngine("a"), SlowEngine("again")
    starts = Starts(ProcessError("no room"), again)
    door = client(starts, a)
    (first,) = await asked_of(door, ("one", 1))
    a.fault = ProcessError("it died")
    a.go.set()
    await asyncio.wait_for(door.wait_for_replacement(), 10)
    assert (door.in_service, first.done(), starts.pauses) == ((), False, [5.0, 10.0])
    await publish(door, version=1)
    again.go.set()
    assert [each.text for each in await asyncio.wait_for(first, 10)] == ["again"]
    assert (names(door), again.weights) == (["again"], ["for 0"])


async def test_the_last_engine_that_does_not_start_again_raises_what_killed_it() -> None:
    a = SlowEngine("a")
    door = client(Starts(*[ProcessError("no room")] * 3), a)
    await asked_of(door, ("one", 1))
    a.fault = ProcessError("it died")
    a.go.set()
    with pytest.raises(ProcessError, match="it died"):
        await asyncio.wait_for(door.wait_for_replacement(), 10)
    await door.pause()
    with pytest.raises(ProcessError, match="it died"):
        await asyncio.wait_for(door.admit_started(), 10)


async def test_the_last_engine_that_dies_between_two_calls_of_a_transfer_ends_it() -> None:
    a, again = SlowEngine("a"), SlowEngine("again")
    door = client(Starts(again), a)
    await door.pause()
    a.fault = ProcessError("it died")

    async def look(engines: Any) -> None:
        raise AssertionError("there is none to look at")

    with pytest.raises(ProcessError, match="it died"):
        await door.inspect(look)
    assert door.in_service == ()
    with pytest.raises(ProcessError, match="it died"):
        await door.load_weights([], version=1)


async def test_what_samples_goes_on_when_the_last_engine_was_started_again() -> None:
    a, again = SlowEngine("a"), SlowEngine("again")
    door = client(Starts(again), a)
    brought = list[str]()

    async def transfer() -> None:
        await publish(door, version=1)
        brought.append("weights")
        again.go.set()

    asked = asyncio.ensure_future(
        ReplacementSync(door, transfer).around(door.generate)(request((1,), count=1, name="one"))
    )
    await asyncio.sleep(0)
    a.fault = ProcessError("it died")
    a.go.set()
    assert [each.text for each in await asyncio.wait_for(asked, 10)] == ["again"]
    assert brought == ["weights"]


async def test_a_transfer_that_fails_ends_what_waits_for_samples() -> None:
    a, again = SlowEngine("a"), SlowEngine("again")
    door = client(Starts(again), a)

    async def transfer() -> None:
        raise ProcessError("policy-0 died")

    asked = asyncio.ensure_future(
        ReplacementSync(door, transfer).around(door.generate)(request((1,), count=1, name="one"))
    )
    await asyncio.sleep(0)
    a.fault = ProcessError("it died")
    a.go.set()
    with pytest.raises(ProcessError, match="policy-0 died"):
        await asyncio.wait_for(asked, 10)


async def test_an_engine_whose_weights_never_change_serves_again_once_it_got_what_the_others_have() -> None:
    a, b, again = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")
    starts = Starts(again)
    door = client(starts, a, b)
    serves = asyncio.Event()

    @asynccontextmanager
    async def admitting(engine: InferenceEngine) -> AsyncIterator[None]:
        assert names(door) == ["b"]
        await engine.add_adapter("one", shared((), rank=1, alpha=1.0))
        yield
        assert names(door) == ["again", "b"]
        serves.set()

    async def work() -> str:
        await lost(door, a, b)
        await serves.wait()
        return "done"

    assert await asyncio.wait_for(door.run_with_restarts(work(), admitting), 10) == "done"
    assert again.events == ["publish one"]


async def test_work_ends_with_the_last_engine_that_does_not_start_again() -> None:
    a = SlowEngine("a")
    door = client(Starts(*[ProcessError("no room")] * 3), a)

    async def work() -> None:
        (asked,) = await asked_of(door, ("one", 1))
        a.fault = ProcessError("it died")
        a.go.set()
        await asked

    with pytest.raises(ProcessError, match="it died"):
        await asyncio.wait_for(door.run_with_restarts(work(), lambda engine: nullcontext()), 10)
