"""Lets sampling continue after the last engine has died, once a new engine has replaced it and has the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from skyrl.inference.pool.client import InferenceEngineClient

P = ParamSpec("P")
R = TypeVar("R")


class Revival:
    """Transfers weights to an engine that replaces the last one, while a call waits for samples.

    The learner is idle during such a call. At any other time the next weight transfer waits for the engine.
    """

    def __init__(self, client: InferenceEngineClient, bring: Callable[[], Awaitable[None]]) -> None:
        """`bring` transfers the newest weights to the engines, and waits for engines that are being started."""
        self._client, self._bring = client, bring
        self._brings = asyncio.Lock()

    def around(self, method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Wraps `method` so that engines are revived while it runs. The wrapper raises the error that killed the last
        engine if none replaces it.
        """

        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            asked = asyncio.ensure_future(method(*args, **kwargs))
            watch = asyncio.ensure_future(self._watch())
            try:
                await asyncio.wait([asked, watch], return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    watch.result()
                return await asked
            finally:
                asked.cancel()
                async with self._brings:  # a transfer is not left halfway
                    watch.cancel()
                await asyncio.gather(asked, watch, return_exceptions=True)

        return call

    async def _watch(self) -> None:
        """Revives engines whenever none is left; ends only with an exception."""
        while True:
            await self._client.bereft()
            async with self._brings:
                await self._bring()
