"""An engine that lives where its handle leads, seen as any other engine."""

from __future__ import annotations

from attrs import evolve

from skyrl.errors import ProcessLost, WeightSyncError
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, InFlight
from skyrl.inference.incoming_weights import IncomingWeights
from skyrl.processes.handles import Handle


class RemoteEngine:
    """`InferenceEngine` over a handle. Raises `ProcessError` from every method when the process is gone."""

    def __init__(self, handle: Handle[InferenceEngine]) -> None:
        self._handle = handle
        self._weight_version = 0

    @property
    def weight_version(self) -> int:
        """The version last adopted through this object; 0 until then."""
        return self._weight_version

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Tokens are not reported before the answer is whole: a callback does not reach another process."""
        return await self._handle.call(InferenceEngine.generate, evolve(request, on_tokens=None))

    async def pause(self, in_flight: InFlight = "finish") -> None:
        await self._handle.call(InferenceEngine.pause, in_flight)

    async def resume(self) -> None:
        await self._handle.call(InferenceEngine.resume)

    async def load_weights(self, incoming: IncomingWeights, version: int) -> None:
        try:
            await self._handle.call(InferenceEngine.load_weights, incoming, version)
        except ProcessLost as error:
            if error.process == self._handle.name:
                raise
            raise WeightSyncError(f"{self._handle.name} got no weights: {error}") from error  # who shared the transfer
        self._weight_version = version

    async def load(self) -> EngineLoad | None:
        return await self._handle.call(InferenceEngine.load)

    async def sleep(self) -> bool:
        return await self._handle.call(InferenceEngine.sleep)

    async def wake(self) -> None:
        await self._handle.call(InferenceEngine.wake)

    async def close(self) -> None:
        await self._handle.call(InferenceEngine.close)
