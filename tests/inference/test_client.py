from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import EngineFailed, ProcessError, ProcessLost, RunError, WeightSyncError
from skyrl.inference.adapters import shared
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, InFlight, SampleKey
from skyrl.inference.pool.admission import ConversationRoutes
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.weight_receiver.incoming_weights import Adapter, IncomingWeights, SharedWeights
from tests.inference.nano import keys, request


class SlowEngine:
    """Answers when told to, remembers what it was asked, and raises what it is given to raise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = asyncio.Event()
        self.asked: list[str] = []
        self.keys: list[tuple[SampleKey, ...]] = []
        self.weights: list[str] = []
        self.events: list[str] = []
        self.weight_version = 0
        self.fault: Exception | None = None
        self.forgets = False
        self.busy: EngineLoad | None = None

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.asked.append(request.keys[0].prompt_id)
        self.keys.append(request.keys)
        await self.go.wait()
        self._fail()
        text = Completion(token_ids=(), text=self.name, logprobs=(), weight_versions=(), stop_reason="stop")
        return (text,) * len(request.keys)

    async def pause(self, in_flight: str = "finish") -> None:
        self._fail()
        self.events.append("pause")

    async def resume(self) -> None:
        self._fail()
        self.events.append("resume")

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        self._fail()
        self.weights = [info.name for info in incoming.weights]
        self.weight_version = version
        return True

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        self.events.append(f"publish {name}")

    async def remove_adapter(self, name: str) -> None:
        self.events.append(f"unpublish {name}")

    async def current_load(self) -> EngineLoad | None:
        self.events.append("load")
        return self.busy

    async def sleep(self) -> bool:
        self.events.append("sleep")
        return self.forgets

    async def wake(self) -> None:
        self.events.append("wake")

    async def close(self) -> None:
        self.events.append("close")

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault


def client(*engines: Any, **config: Any) -> InferenceEngineClient:
    contract: list[InferenceEngine] = list(engines)
    unused: Any = None  # the client only holds the tokenizer
    return InferenceEngineClient(contract, unused, "a/model", SkyRLLoraConfig(), InferenceEngineConfig(**config))


def weights(name: str) -> SharedWeights:
    return SharedWeights(((name, torch.zeros(1)),))


async def asked_of(engine_client: InferenceEngineClient, *sizes: tuple[str, int]) -> list[asyncio.Task[Any]]:
    tasks = []
    for name, count in sizes:
        tasks.append(asyncio.create_task(engine_client.generate(request((1,), count=count, name=name))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


async def test_a_request_goes_to_the_engine_with_the_fewest_samples_in_flight() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    tasks = await asked_of(engine_client, ("big", 8), ("small", 2), ("second small", 2), ("third small", 8))
    assert (a.asked, b.asked) == (["big"], ["small", "second small", "third small"])
    a.go.set()
    b.go.set()
    assert [answer[0].text for answer in await asyncio.gather(*tasks)] == ["a", "b", "b", "b"]
    await engine_client.generate(request((1,), name="after"))
    assert a.asked[-1] == "after"  # what is finished no longer counts


async def test_no_engine_is_given_more_samples_than_it_runs_at_once() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b, max_num_seqs=4)
    tasks = await asked_of(engine_client, ("1", 3), ("2", 3), ("3", 3), ("4", 1), ("huge", 9))
    assert (a.asked, b.asked) == (["1"], ["2"])  # the small fourth waits its turn behind the third
    b.go.set()
    await tasks[1]
    for _ in range(10):  # turns of the event loop, in which whoever may go on does
        await asyncio.sleep(0)
    assert (a.asked, b.asked) == (["1", "4"], ["2", "3", "huge"])  # larger than an engine: to one that is idle
    a.go.set()
    assert len(await tasks[4]) == 9


def turn(name: str, number: int) -> GenerationRequest:
    """One turn of a conversation."""
    generation_request = request((1,), name=name)
    return evolve(generation_request, keys=tuple(evolve(key, turn=number) for key in generation_request.keys))


async def test_the_turns_of_a_conversation_go_to_the_engine_that_has_their_prefix() -> None:
    """By samples in flight, the second turns would go the other way: `a` has more of them than `b`."""
    a, b = SlowEngine("a"), SlowEngine("b")
    a.go.set()
    b.go.set()
    engine_client = client(a, b)
    await engine_client.generate(turn("first", 0))
    a.go.clear()
    waiting = await asked_of(engine_client, ("busy", 2))
    await engine_client.generate(turn("second", 0))
    late = asyncio.create_task(engine_client.generate(turn("first", 1)))
    a.go.set()
    await engine_client.generate(turn("second", 1))
    await asyncio.gather(late, *waiting)
    assert (a.asked, b.asked) == (["first", "busy", "first"], ["second", "second"])


async def test_a_conversation_moves_where_its_engine_is_full_and_stays_there() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    a.go.set()
    b.go.set()
    engine_client = client(a, b, max_num_seqs=2)
    await engine_client.generate(turn("talk", 0))
    a.go.clear()
    waiting = await asked_of(engine_client, ("busy", 2))
    await engine_client.generate(turn("talk", 1))
    a.go.set()
    await asyncio.gather(*waiting)
    await engine_client.generate(turn("talk", 2))
    assert (a.asked, b.asked) == (["talk", "busy"], ["talk", "talk"])


async def test_a_conversation_whose_engine_was_lost_goes_on_elsewhere() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    a.go.set()
    b.go.set()
    engine_client = client(a, b)
    await engine_client.generate(turn("talk", 0))
    a.fault = ProcessError("it died")
    await engine_client.generate(turn("talk", 1))
    await engine_client.generate(turn("talk", 2))
    assert (a.asked, b.asked) == (["talk", "talk"], ["talk", "talk"])


PROMPT = tuple(range(40))


async def asked_one_by_one(engine_client: InferenceEngineClient, *prompts: tuple[int, ...]) -> list[asyncio.Task[Any]]:
    """A request for one sample of each prompt."""
    tasks = []
    for number, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(engine_client.generate(request(prompt, name=f"{number}"))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


async def test_samples_of_one_prompt_go_to_the_engine_that_computes_it() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    other = tuple(range(100, 140))
    tasks = await asked_one_by_one(engine_client, PROMPT, other, PROMPT, PROMPT, other, (*PROMPT, 7, 8))
    assert (a.asked, b.asked) == (["0", "2", "3", "5"], ["1", "4"])
    a.go.set()
    b.go.set()
    await asyncio.gather(*tasks)


async def test_an_overloaded_engine_gets_no_more_samples_for_its_cached_prefix() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    tasks = await asked_one_by_one(engine_client, *[PROMPT] * 40)
    assert a.asked[:16] == [str(number) for number in range(16)]
    assert (len(a.asked), len(b.asked)) == (20, 20)  # from then on the other one has it, too
    a.go.set()
    b.go.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(("in_flight", "chosen"), [("finish", ["1"]), ("keep", ["0", "1"])])
async def test_what_was_cached_before_new_weights_is_forgotten_unless_it_is_kept(
    in_flight: InFlight, chosen: list[str]
) -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    engine_client._in_flight = in_flight
    a.go.set()
    b.go.set()
    await asyncio.gather(*await asked_one_by_one(engine_client, tuple(range(100, 140)), PROMPT))
    assert (a.asked, b.asked) == (["0"], ["1"])
    await engine_client.load_weights([weights("w"), weights("w")], 1)
    await engine_client.generate(request(PROMPT, name="1"))
    assert b.asked == ["1"] + (["1"] if in_flight == "keep" else [])


async def test_an_engine_that_queues_is_given_fewer_samples_and_the_others_take_what_waits() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    a.go.set()
    b.go.set()
    engine_client = client(a, b, max_num_seqs=8)
    a.busy, b.busy = EngineLoad(waiting=3), EngineLoad(waiting=0)
    tasks = await asked_of(engine_client, *[(f"first {n}", 1) for n in range(16)])
    await asyncio.gather(*tasks)
    for _ in range(10):
        await asyncio.sleep(0)
    assert a.events.count("load") > 1
    assert b.events.count("load") > 1
    a.asked.clear()
    b.asked.clear()
    a.go.clear()
    b.go.clear()
    tasks = await asked_of(engine_client, *[(f"second {n}", 1) for n in range(16)])
    assert len(a.asked) < len(b.asked) == 8
    a.go.set()
    b.go.set()
    await asyncio.gather(*tasks)


async def test_a_single_engine_is_not_asked_for_its_load() -> None:
    a = SlowEngine("a")
    a.go.set()
    engine_client = client(a, max_num_seqs=8)
    await asyncio.gather(*await asked_of(engine_client, *[(f"{n}", 1) for n in range(16)]))
    assert a.events == []


def test_the_oldest_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.inference.pool.admission.MOST_CONVERSATIONS", 2)
    known: ConversationRoutes[str] = ConversationRoutes()
    for name in ("old", "kept", "new"):
        known.record_drawn(turn(name, 0), name)
    assert [known.engine_of(turn(name, 1)) for name in ("old", "kept", "new")] == [None, "kept", "new"]
    assert known.engine_of(turn("new", 0)) is None


async def test_a_request_that_is_given_up_while_it_waits_takes_no_room() -> None:
    a = SlowEngine("a")
    engine_client = client(a, max_num_seqs=2)
    first, waiting, third = await asked_of(engine_client, ("1", 2), ("2", 2), ("3", 2))
    waiting.cancel()
    a.go.set()
    await asyncio.gather(first, third)
    assert a.asked == ["1", "3"]


async def test_everything_else_goes_to_all_engines() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    await engine_client.pause()
    await engine_client.sleep()
    await engine_client.wake()
    await engine_client.load_weights([weights("for a"), weights("for b")], version=3)
    await engine_client.resume()
    await engine_client.add_adapter("name", shared((), rank=1, alpha=1.0))
    await engine_client.remove_adapter("name")
    await engine_client.close()
    assert a.events == b.events == ["pause", "sleep", "wake", "resume", "publish name", "unpublish name", "close"]
    assert (a.weights, b.weights) == (["for a"], ["for b"])
    assert engine_client.weight_version == 3


async def test_an_adapter_that_one_engine_refuses_is_published_on_none() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)

    async def refuse(name: str, adapter: Adapter) -> None:
        raise WeightSyncError("it does not fit")

    b.add_adapter = refuse  # type: ignore[method-assign]  # one engine fails
    with pytest.raises(WeightSyncError, match="it does not fit"):
        await engine_client.add_adapter("name", shared((), rank=1, alpha=1.0))
    assert (a.events, b.events) == (["publish name", "unpublish name"], [])


async def test_engines_that_end_with_their_processes_are_not_closed() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    await client(a, b).close(engines_end_otherwise=True)
    assert a.events == b.events == []


async def test_requests_of_a_dead_engine_are_drawn_elsewhere_from_the_same_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    tasks = await asked_of(engine_client, ("1", 2), ("2", 2), ("3", 2))
    a.fault = ProcessError("engine-0 died")
    with caplog.at_level(logging.WARNING):
        a.go.set()
        b.go.set()
        answers = await asyncio.gather(*tasks)
    assert {answer[0].text for answer in answers} == {"b"}
    assert b.keys[-2:] == [keys("1", 2), keys("3", 2)]
    assert engine_client.in_service == (b,)
    assert engine_client.metrics == {"inference/engines_in_service": 1, "inference/engines_lost": 1}
    assert [record.message for record in caplog.records] == [  # once, for two requests
        "inference engine 0 is out of service, 1 left: engine-0 died"
    ]


async def test_the_last_engine_raises_what_killed_it_for_everyone_who_waits() -> None:
    a = SlowEngine("a")
    engine_client = client(a, max_num_seqs=2)
    tasks = await asked_of(engine_client, ("1", 2), ("2", 2))
    a.fault = ProcessLost("engine-0 died", "engine-0")
    a.go.set()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert [str(outcome) for outcome in outcomes] == [
        "engine-0 died. No engine is left. The same command continues from the last checkpoint, or starts from scratch "
        "if there is none."
    ] * 2
    [first, second] = outcomes
    assert isinstance(first, ProcessLost) and first.role == "engine", "recovery goes by the class and the role"
    assert str(a.fault) == "engine-0 died" and isinstance(second, ProcessLost)


async def test_an_error_of_the_request_itself_is_not_tried_elsewhere() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    a.fault = RunError("prompt 'x' is empty")
    a.go.set()
    with pytest.raises(RunError, match="is empty"):
        await engine_client.generate(request((1,)))
    assert (b.asked, engine_client.in_service) == ([], (a, b))


async def test_an_engine_that_does_not_take_the_weights_that_others_took_is_lost() -> None:
    a, b, c = SlowEngine("a"), SlowEngine("b"), SlowEngine("c")
    engine_client = client(a, b, c)
    b.fault = WeightSyncError("b refuses")
    await engine_client.load_weights([weights("x")] * 3, version=1)
    assert engine_client.in_service == (a, c)
    assert engine_client.weight_version == 1


async def test_weights_that_no_engine_takes_are_an_error_and_all_serve_on() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    a.fault = b.fault = WeightSyncError("x is missing")
    with pytest.raises(WeightSyncError, match="x is missing"):
        await engine_client.load_weights([weights("y")] * 2, version=1)
    assert engine_client.in_service == (a, b)
    assert engine_client.weight_version == 0


async def test_the_engine_that_ended_is_named_and_not_the_one_that_missed_it() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    a.fault, b.fault = WeightSyncError("connection closed by peer"), ProcessError("b died")
    with pytest.raises(ProcessError, match="b died"):
        await engine_client.load_weights([weights("y")] * 2, version=1)


@pytest.mark.parametrize("fault", [ProcessError("b died"), WeightSyncError("b refuses"), RunError("b fails")])
async def test_engines_that_wait_for_one_that_cannot_take_part_are_told_and_awaited(fault: RunError) -> None:
    a, b = WaitingEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    b.fault = fault
    with pytest.raises(type(fault), match=str(fault)):
        await asyncio.wait_for(engine_client.load_weights([weights("y")] * 2, version=1, abort=a.abort), 10)
    left = (a,) if isinstance(fault, ProcessError) else (a, b)
    assert engine_client.in_service == left
    b.fault = None
    await engine_client.load_weights([weights("z")] * len(left), version=1)
    assert a.weights == ["z"]


class WaitingEngine(SlowEngine):
    """Its first weights do not come before they are called off."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.loop = asyncio.get_running_loop()
        self.aborted: asyncio.Future[str] = self.loop.create_future()

    def abort(self, reason: str) -> None:
        """From another thread."""
        self.loop.call_soon_threadsafe(self.aborted.set_result, reason)

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        if not self.aborted.done():
            raise WeightSyncError(await self.aborted)
        return await super().load_weights(incoming, version)


async def test_engines_with_different_weights_are_an_error() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    b.weight_version = 1
    with pytest.raises(WeightSyncError, match=r"versions \[0, 1\]"):
        _ = engine_client.weight_version


async def test_engines_can_be_looked_at_while_no_request_comes_through() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    a.go.set()
    engine_client = client(a, b)
    await engine_client.pause()
    (waiting,) = await asked_of(engine_client, ("outside", 1))

    async def look(engines: Mapping[int, InferenceEngine]) -> int:
        await engines[0].generate(request((1,), name="inside"))
        return len(engines)

    assert await engine_client.inspect(look) == 2
    assert (a.asked, b.asked) == (["inside"], [])
    assert a.events == b.events == ["pause", "resume", "pause"]
    await engine_client.resume()
    await waiting
    assert a.asked == ["inside", "outside"]


async def test_weights_that_are_gone_with_the_memory_are_missed_until_they_are_loaded() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    await engine_client.pause()
    await engine_client.sleep()
    assert engine_client.holds_weights
    b.forgets = True
    await engine_client.sleep()
    assert not engine_client.holds_weights
    await engine_client.load_weights([weights("w"), weights("w")], 1)
    assert engine_client.holds_weights


async def test_a_sample_that_stands_still_in_an_engine_that_is_lost_is_drawn_elsewhere() -> None:
    """The engine is alive, but does not take new weights: nobody will resume it."""
    a, b = SlowEngine("a"), SlowEngine("b")
    b.go.set()
    engine_client = client(a, b)
    (frozen,) = await asked_of(engine_client, ("x", 1))
    assert a.asked == ["x"]
    await engine_client.pause()
    a.fault = WeightSyncError("a half of them")
    await engine_client.load_weights([weights("w"), weights("w")], 1)
    await engine_client.resume()
    assert (await frozen)[0].text == "b"
    assert a.keys == b.keys


async def test_an_engine_that_cancels_a_call_on_its_own_gives_no_answer_and_is_not_asked_for_ever() -> None:
    class Cancelling(SlowEngine):
        async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await client(Cancelling("a")).generate(request((1,)))


async def test_an_engine_that_dies_while_it_is_looked_at_is_lost_and_the_others_are_looked_at() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    a.go.set()
    b.go.set()
    engine_client = client(a, b)
    await engine_client.pause()

    async def look(engines: Mapping[int, InferenceEngine]) -> dict[int, str]:
        a.fault = ProcessError("engine-0 died")
        return {number: (await engine.generate(request((1,))))[0].text for number, engine in engines.items()}

    assert await engine_client.inspect(look) == {1: "b"}
    assert engine_client.in_service == (b,)


async def test_an_engine_that_fails_only_where_it_is_looked_at_is_lost() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    await engine_client.pause()

    async def look(engines: Mapping[int, InferenceEngine]) -> tuple[int, ...]:
        if 0 in engines:
            raise EngineFailed(0, ProcessError("it answers no samples"))
        return tuple(engines)

    assert await engine_client.inspect(look) == (1,)
    assert engine_client.in_service == (b,)


async def test_the_last_engine_that_fails_where_it_is_looked_at_ends_the_run_with_its_error() -> None:
    a = SlowEngine("a")
    engine_client = client(a)
    await engine_client.pause()

    async def look(engines: Mapping[int, InferenceEngine]) -> None:
        raise EngineFailed(0, ProcessError("it answers no samples"))

    with pytest.raises(ProcessError, match=r"it answers no samples\. No engine is left") as caught:
        await engine_client.inspect(look)
    assert type(caught.value) is ProcessError
    assert a.events == ["pause", "resume", "pause"]


async def test_an_error_of_a_look_at_engines_that_live_is_raised() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    await engine_client.pause()

    async def look(engines: Mapping[int, InferenceEngine]) -> None:
        raise ProcessError("policy-0 died")

    with pytest.raises(ProcessError, match="policy-0 died"):
        await engine_client.inspect(look)
    assert engine_client.in_service == (a, b)


async def test_an_engine_that_dies_while_all_are_paused_is_lost() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    engine_client = client(a, b)
    a.fault = ProcessError("engine-0 died")
    await engine_client.pause()
    assert engine_client.in_service == (b,)
