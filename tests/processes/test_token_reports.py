"""Tokens of an engine behind a handle, in this process and on Ray: they come while the engine is held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from attrs import evolve

from skyrl.config import SamplingParams
from skyrl.errors import RunError
from skyrl.inference.engine import Completion, GenerationRequest, NewTokens, SampleKey
from skyrl.inference.pool.engine_proxy import EngineProxy
from skyrl.processes.handles import Handle
from skyrl.processes.in_process import InProcess
from tests.processes.conftest import SharedCluster
from tests.processes.engines import IDS, HeldEngine, open_reports

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module", params=["in process", "on Ray"])
def engine(request: pytest.FixtureRequest) -> Handle[HeldEngine]:
    if request.param == "in process":
        return InProcess().start("engine", [HeldEngine]).handles[0]
    shared: SharedCluster = request.getfixturevalue("shared_cluster")
    return shared.processes().start("engine", [HeldEngine]).handles[0]


class Listener:
    """What was heard of a request, and a way to wait for it."""

    def __init__(self, prompt: tuple[int, ...] = (1,)) -> None:
        self.heard: list[NewTokens] = []
        self.came = asyncio.Event()
        key = SampleKey(run_seed=0, weight_version=0, prompt_id="a prompt", sample_index=0)
        self.request = GenerationRequest(
            prompt_ids=prompt, sampling=SamplingParams(), keys=(key,), on_tokens=self._listen
        )

    def _listen(self, new: NewTokens) -> None:
        self.heard.append(new)
        self.came.set()

    async def until(self, count: int) -> None:
        while len(self.heard) < count:
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), 60)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for new in self.heard for token in new.token_ids)


def drawing(engine: Handle[Any], listener: Listener) -> asyncio.Task[tuple[Completion, ...]]:
    return asyncio.ensure_future(EngineProxy(engine).generate(listener.request))


@pytest.mark.sampled(2)
async def test_tokens_come_while_the_engine_is_held(engine: Handle[HeldEngine]) -> None:
    await engine.call(HeldEngine.hold)
    one, other = Listener(), Listener()
    answers = [drawing(engine, listener) for listener in (one, other)]
    await one.until(2)
    await other.until(2)
    assert one.ids == other.ids == IDS[:2]
    await engine.call(HeldEngine.let_go)
    for listener, answer in zip((one, other), answers, strict=True):
        (completion,) = await answer
        assert completion.token_ids == listener.ids == IDS
        assert [new.start for new in listener.heard] == [0, 1, 2]
    assert await engine.call(open_reports) == 0


@pytest.mark.sampled(2)
async def test_a_request_that_is_given_up_ends_in_the_engine_and_its_report_too(engine: Handle[HeldEngine]) -> None:
    await engine.call(HeldEngine.hold)
    before, listener = await engine.call(HeldEngine.times_given_up), Listener()
    answer = drawing(engine, listener)
    await listener.until(2)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    async with asyncio.timeout(60):
        while (await engine.call(HeldEngine.times_given_up), await engine.call(open_reports)) != (before + 1, 0):
            await asyncio.sleep(0.01)


@pytest.mark.long
async def test_what_the_engine_raises_behind_its_tokens_is_raised(engine: Handle[HeldEngine]) -> None:
    await engine.call(HeldEngine.hold)
    listener = Listener(prompt=(1, 2))
    answer = drawing(engine, listener)
    await listener.until(2)
    await engine.call(HeldEngine.let_go)
    with pytest.raises(RunError, match=r"^out of order$"):
        await answer
    assert listener.ids == IDS[:2]
    assert await engine.call(open_reports) == 0


async def test_a_request_that_nobody_listens_to_opens_no_report(engine: Handle[HeldEngine]) -> None:
    await engine.call(HeldEngine.let_go)
    silent = evolve(Listener().request, on_tokens=None)
    handle: Handle[Any] = engine
    (completion,) = await EngineProxy(handle).generate(silent)
    assert completion.token_ids == IDS
