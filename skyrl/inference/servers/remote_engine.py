"""An engine in another process, used through a handle like any other engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from attrs import evolve

from skyrl.errors import ProcessLost, WeightSyncError
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, InFlight, NewTokens
from skyrl.inference.token_reports import draw_and_report, new_tokens, open_report
from skyrl.processes.handles import Handle
from skyrl.weight_receiver.incoming_weights import IncomingWeights


class RemoteEngine:
    """An `InferenceEngine` over a handle. Every method raises `ProcessError` if the process is gone."""

    def __init__(self, handle: Handle[InferenceEngine]) -> None:
        self._handle = handle
        self._weight_version = 0

    @property
    def weight_version(self) -> int:
        """The version of the weights that was last adopted through this object; 0 until then."""
        return self._weight_version

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order. A callback cannot reach another process: tokens are fetched for it."""
        if request.elsewhere is not None:
            request = evolve(request, elsewhere=None)
        if request.on_tokens is None:
            return await self._handle.call(InferenceEngine.generate, request)
        name = secrets.token_hex(16)
        await self._handle.call(open_report, name)
        call = self._handle.call(draw_and_report, evolve(request, on_tokens=None), name)
        drawing, hearing = asyncio.ensure_future(call), asyncio.ensure_future(self._hear(name, request.on_tokens))
        try:
            await asyncio.wait((drawing, hearing))
            return drawing.result()  # raises if the process is gone
        finally:
            for task in (drawing, hearing):
                task.cancel()
            await asyncio.gather(drawing, hearing, return_exceptions=True)

    async def _hear(self, name: str, on_tokens: Callable[[NewTokens], None]) -> None:
        """Pass on the tokens of a report until it is closed."""
        while (found := await self._handle.call(new_tokens, name)) is not None:
            for new in found:
                on_tokens(new)

    async def pause(self, in_flight: InFlight = "finish") -> None:
        await self._handle.call(InferenceEngine.pause, in_flight)

    async def resume(self) -> None:
        await self._handle.call(InferenceEngine.resume)

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        try:
            are_loaded = await self._handle.call(InferenceEngine.load_weights, incoming, version)
        except ProcessLost as error:
            if error.process == self._handle.name:
                raise
            raise WeightSyncError(f"{self._handle.name} got no weights: {error}") from error  # another member ended
        self._weight_version = version
        return are_loaded

    async def load(self) -> EngineLoad | None:
        return await self._handle.call(InferenceEngine.load)

    async def sleep(self) -> bool:
        return await self._handle.call(InferenceEngine.sleep)

    async def wake(self) -> None:
        await self._handle.call(InferenceEngine.wake)

    async def close(self) -> None:
        await self._handle.call(InferenceEngine.close)
