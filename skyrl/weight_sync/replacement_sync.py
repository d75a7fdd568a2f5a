"""Lets sampling continue after the last engine has died, once a new engine has replaced it and has the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from skyrl.inference.pool.client import InferenceEngineClient

P = ParamSpec("P")
R = TypeVar("R")


class ReplacementSync:
    """Transfers weights to an engine that replaces the last one, while a call waits for samples.

    The learner is idle during such a call. At any other time the next weight transfer waits for the engine.
    """

    def __init__(self, client: InferenceEngineClient, transfer: Callable[[], Awaitable[None]]) -> None:
        """`transfer` transfers the newest weights to the engines, and waits for engines that are being started."""
        self._client, self._transfer = client, transfer
        self._transferring = asyncio.Lock()

    def around(self, method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Wraps `method` so that new engines get the weights while it runs. The wrapper raises the error that killed
        the last engine if none replaces it.
        """

        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            sampling = asyncio.ensure_future(method(*args, **kwargs))
            watch = asyncio.ensure_future(self._watch())
            try:
                await asyncio.wait([sampling, watch], return_when=asyncio.FIRST_COMPLETED)
                if not sampling.done():
                    watch.result()
                return await sampling
            finally:
                sampling.cancel()
                async with self._transferring:  # a transfer is not left halfway
                    watch.cancel()
                await asyncio.gather(sampling, watch, return_exceptions=True)

        return call

    async def _watch(self) -> None:
        """Sends weights to new engines whenever none is left; ends only with an exception."""
        while True:
            await self._client.wait_for_replacement()
            async with self._transferring:
                await self._transfer()
