"""A call for samples goes on when its last engine died and another one came; no process takes part."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl.errors import ProcessError
from skyrl.weight_sync.publish import ReplacementSync


class Engines:
    """A client whose engines die when it is told to."""

    def __init__(self, cause: ProcessError | None = None) -> None:
        """`cause`: what killed the last engine, where none will follow it."""
        self.died, self.brought, self._cause = asyncio.Event(), 0, cause
        self.has_weights, self.travels = asyncio.Event(), asyncio.Event()
        self.travels.set()

    async def wait_for_replacement(self) -> None:
        await self.died.wait()
        self.died.clear()
        if self._cause is not None:
            raise self._cause

    async def transfer(self) -> None:
        await self.travels.wait()
        self.brought += 1
        self.has_weights.set()

    def around(self, method: Any) -> Any:
        client: Any = self
        return ReplacementSync(client, self.transfer).around(method)


async def test_engines_get_the_weights_as_often_as_the_last_one_dies_while_samples_are_drawn() -> None:
    engines = Engines()

    async def samples(prompts: int, *, twice: bool) -> int:
        for _ in range(2 if twice else 1):
            engines.died.set()
            await engines.has_weights.wait()
            engines.has_weights.clear()
        return prompts

    assert await engines.around(samples)(16, twice=True) == 16
    assert engines.brought == 2


async def test_what_killed_the_last_engine_ends_the_call_and_what_it_was_doing() -> None:
    engines, ended = Engines(ProcessError("killed")), []

    async def samples() -> None:
        engines.died.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("samples")

    with pytest.raises(ProcessError, match="killed"):
        await engines.around(samples)()
    assert ended == ["samples"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_samples_raise_is_raised_and_nothing_watches_any_more() -> None:
    engines = Engines()

    async def samples() -> None:
        raise ValueError("no prompt")

    with pytest.raises(ValueError, match="no prompt"):
        await engines.around(samples)()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_transfer_is_not_left_halfway_when_the_samples_are_there() -> None:
    engines = Engines()
    engines.travels.clear()

    async def samples() -> None:
        engines.died.set()
        while engines.died.is_set():  # until the transfer has begun
            await asyncio.sleep(0)

    call = asyncio.ensure_future(engines.around(samples)())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.done()
    engines.travels.set()
    await call
    assert engines.brought == 1
