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
from skyrl.weight_sync.publish import ReplacementSync
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


def names(engine_client: InferenceEngineClient) -> list[str]:
    """Names of the engines in service."""
    serving: list[Any] = list(engine_client.in_service)
    return [engine.name for engine in serving]


async def lost(engine_client: InferenceEngineClient, engine: SlowEngine, *others: SlowEngine) -> None:
    """The engine dies while it draws."""
    tasks = await asked_of(engine_client, *((str(number), 1) for number in range(1 + len(others))))
    engine.fault = ProcessError("it died")
    for lost_engine in (engine, *others):
        lost_engine.go.set()
    await asyncio.gather(*tasks)


async def publish(engine_client: InferenceEngineClient, version: int) -> None:
    """New weights, as `WeightSync` brings them."""
    await engine_client.pause()
    await engine_client.admit_started()
    await engine_client.load_weights([weights(f"for {n}") for n in range(len(engine_client.in_service))], version)
    await engine_client.resume()


async def test_an_engine_that_died_serves_again_with_the_next_weights() -> None:
    a, b, replacement = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")
    starts = Starts(replacement)
    engine_client = client(starts, a, b)
    await lost(engine_client, a, b)
    await starts.ended()
    assert names(engine_client) == ["b"]  # it is there, and holds old weights
    assert replacement.events == []
    await publish(engine_client, version=1)
    assert names(engine_client) == ["again", "b"]
    assert (replacement.weights, b.weights) == (["for 0"], ["for 1"])
    assert replacement.events == ["pause", "resume"]
    assert engine_client.metrics == {
        "inference/engines_in_service": 2,
        "inference/engines_lost": 0,
        "inference/engine_restarts": 1,
    }


async def test_pauses_grow_and_an_engine_is_started_only_so_often() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    starts = Starts(*(ProcessError("no room") for _ in range(3)))
    engine_client = client(starts, a, b)
    await lost(engine_client, a, b)
    await starts.ended()
    assert (starts.pauses, starts.numbers) == ([5.0, 10.0, 20.0], [0, 0, 0])
    await publish(engine_client, version=1)
    assert names(engine_client) == ["b"]


async def test_the_number_of_restarts_holds_for_the_whole_run() -> None:
    b = SlowEngine("b")
    engines = [SlowEngine(str(number)) for number in range(4)]
    starts = Starts(*engines[1:])
    engine_client = client(starts, engines[0], b)
    for version, engine in enumerate(engines, 1):
        await lost(engine_client, engine, b)
        await starts.ended()
        await publish(engine_client, version)
    assert starts.numbers == [0, 0, 0]
    assert names(engine_client) == ["b"]


async def test_an_engine_without_whole_weights_is_started_again() -> None:
    a, b, replacement = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")
    starts = Starts(replacement)
    engine_client = client(starts, a, b)
    a.fault = WeightSyncError("bytes were changed")
    a.pause = b.pause  # type: ignore[method-assign]  # only the weights do not get through
    await publish(engine_client, version=1)
    await starts.ended()
    assert names(engine_client) == ["b"]
    await publish(engine_client, version=2)
    assert names(engine_client) == ["again", "b"]


async def test_one_that_dies_again_before_it_serves_is_started_once_more() -> None:
    a, b, first, second = (SlowEngine(name) for name in ("a", "b", "first", "second"))
    starts = Starts(first, second)
    engine_client = client(starts, a, b)
    await lost(engine_client, a, b)
    await starts.ended()
    first.fault = ProcessError("it died again")
    await publish(engine_client, version=1)
    await starts.ended()
    await publish(engine_client, version=2)
    assert names(engine_client) == ["second", "b"]


@pytest.mark.parametrize("waits", [lambda: asyncio.Event().wait(), lambda: asyncio.sleep(0)])
async def test_the_end_of_a_run_waits_for_no_start_and_closes_what_nobody_took(waits: Callable[[], Any]) -> None:
    a, b, replacement = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")

    async def start(number: int) -> InferenceEngine:
        await waits()
        engine: Any = replacement
        started: InferenceEngine = engine
        return started

    restarts = EngineRestarts(start, most=1, backoff=0.0, sleep=lambda seconds: asyncio.sleep(0))
    unused: Any = None
    contract: list[Any] = [a, b]
    engine_client = InferenceEngineClient(
        contract, unused, "a/model", SkyRLLoraConfig(), InferenceEngineConfig(), restarts=restarts
    )
    await lost(engine_client, a, b)
    for _ in range(5):
        await asyncio.sleep(0)
    await engine_client.close()
    assert replacement.events in ([], ["close"])
    assert restarts.take() == []


async def test_requests_wait_for_the_engine_that_takes_the_place_of_the_last() -> None:
    a, replacement = SlowEngine("a"), SlowEngine("again")
    starts = Starts(ProcessError("no room"), replacement)
    engine_client = client(starts, a)
    (first,) = await asked_of(engine_client, ("one", 1))
    a.fault = ProcessError("it died")
    a.go.set()
    await asyncio.wait_for(engine_client.wait_for_replacement(), 10)
    assert (engine_client.in_service, first.done(), starts.pauses) == ((), False, [5.0, 10.0])
    await publish(engine_client, version=1)
    replacement.go.set()
    assert [completion.text for completion in await asyncio.wait_for(first, 10)] == ["again"]
    assert (names(engine_client), replacement.weights) == (["again"], ["for 0"])


async def test_the_last_engine_that_does_not_start_again_raises_what_killed_it() -> None:
    a = SlowEngine("a")
    engine_client = client(Starts(*[ProcessError("no room")] * 3), a)
    await asked_of(engine_client, ("one", 1))
    a.fault = ProcessError("it died")
    a.go.set()
    with pytest.raises(ProcessError, match="it died"):
        await asyncio.wait_for(engine_client.wait_for_replacement(), 10)
    await engine_client.pause()
    with pytest.raises(ProcessError, match="it died"):
        await asyncio.wait_for(engine_client.admit_started(), 10)


async def test_the_last_engine_that_dies_between_two_calls_of_a_transfer_ends_it() -> None:
    a, replacement = SlowEngine("a"), SlowEngine("again")
    engine_client = client(Starts(replacement), a)
    await engine_client.pause()
    a.fault = ProcessError("it died")

    async def look(engines: Any) -> None:
        raise AssertionError("there is none to look at")

    with pytest.raises(ProcessError, match="it died"):
        await engine_client.inspect(look)
    assert engine_client.in_service == ()
    with pytest.raises(ProcessError, match="it died"):
        await engine_client.load_weights([], version=1)


async def test_what_samples_goes_on_when_the_last_engine_was_started_again() -> None:
    a, replacement = SlowEngine("a"), SlowEngine("again")
    engine_client = client(Starts(replacement), a)
    brought = list[str]()

    async def transfer() -> None:
        await publish(engine_client, version=1)
        brought.append("weights")
        replacement.go.set()

    task = asyncio.ensure_future(
        ReplacementSync(engine_client, transfer).around(engine_client.generate)(request((1,), count=1, name="one"))
    )
    await asyncio.sleep(0)
    a.fault = ProcessError("it died")
    a.go.set()
    assert [completion.text for completion in await asyncio.wait_for(task, 10)] == ["again"]
    assert brought == ["weights"]


async def test_a_transfer_that_fails_ends_what_waits_for_samples() -> None:
    a, replacement = SlowEngine("a"), SlowEngine("again")
    engine_client = client(Starts(replacement), a)

    async def transfer() -> None:
        raise ProcessError("policy-0 died")

    task = asyncio.ensure_future(
        ReplacementSync(engine_client, transfer).around(engine_client.generate)(request((1,), count=1, name="one"))
    )
    await asyncio.sleep(0)
    a.fault = ProcessError("it died")
    a.go.set()
    with pytest.raises(ProcessError, match="policy-0 died"):
        await asyncio.wait_for(task, 10)


async def test_an_engine_whose_weights_never_change_serves_again_once_it_got_what_the_others_have() -> None:
    a, b, replacement = SlowEngine("a"), SlowEngine("b"), SlowEngine("again")
    starts = Starts(replacement)
    engine_client = client(starts, a, b)
    serves = asyncio.Event()

    @asynccontextmanager
    async def admitting(engine: InferenceEngine) -> AsyncIterator[None]:
        assert names(engine_client) == ["b"]
        await engine.add_adapter("one", shared((), rank=1, alpha=1.0))
        yield
        assert names(engine_client) == ["again", "b"]
        serves.set()

    async def work() -> str:
        await lost(engine_client, a, b)
        await serves.wait()
        return "done"

    assert await asyncio.wait_for(engine_client.run_with_restarts(work(), admitting), 10) == "done"
    assert replacement.events == ["publish one"]


async def test_work_ends_with_the_last_engine_that_does_not_start_again() -> None:
    a = SlowEngine("a")
    engine_client = client(Starts(*[ProcessError("no room")] * 3), a)

    async def work() -> None:
        (task,) = await asked_of(engine_client, ("one", 1))
        a.fault = ProcessError("it died")
        a.go.set()
        await task

    with pytest.raises(ProcessError, match="it died"):
        await asyncio.wait_for(engine_client.run_with_restarts(work(), lambda engine: nullcontext()), 10)
