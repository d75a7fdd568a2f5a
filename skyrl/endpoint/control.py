"""Control of the engines behind the endpoint by a training run: pause, resume, load weights, set their version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from attrs import evolve

from skyrl.errors import WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, InFlight
from skyrl.weight_receiver.incoming_weights import (
    BroadcastWeights,
    IncomingWeights,
    RemoteWeights,
    VLLMNativeWeights,
    acknowledgement,
)


class ServedEngines(Protocol):
    """Interface of all engines behind the endpoint together: `InferenceEngineClient`."""

    @property
    def in_service(self) -> Sequence[InferenceEngine]:
        """The engines that receive new weights, in order."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that all engines sample from."""

    @property
    def running(self) -> int:
        """Number of samples that engines are working on."""

    async def waiting(self) -> int:
        """Number of samples that wait for an engine."""

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Draw the samples of a request."""

    async def pause(self, in_flight: InFlight | None = None) -> None:
        """Pause the engines: returns when no sample is running, and later requests wait."""

    async def resume(self) -> None:
        """Accept requests again."""

    async def load_weights(self, incoming_sets: Sequence[IncomingWeights], version: int) -> None:
        """Load one set of weights into each engine. Raises `WeightSyncError`."""


class EngineControl:
    """Controls the engines, on their event loop. A change that has begun is completed even if its caller goes away."""

    def __init__(self, engines: ServedEngines, *, workers: int) -> None:
        """`workers` is the number of processes per engine that receive weights."""
        self._engines, self.workers = engines, workers
        self._versions = {engines.weight_version: 0}
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self.is_paused = False
        """Whether a pause was requested and not ended yet."""

    @property
    def version(self) -> int:
        """Version of the weights in the run's numbering."""
        return self._versions[self._engines.weight_version]

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Draw the samples of a request, with weight versions in the run's numbering. Raises the engines' errors."""
        drawn = await self._engines.generate(request)
        return tuple(
            evolve(sample, weight_versions=tuple(self._versions[version] for version in sample.weight_versions))
            for sample in drawn
        )

    async def pause(self, in_flight: InFlight) -> None:
        """Pause the engines: returns when no sample is running, and later requests wait."""
        self.is_paused = True
        await self._change(lambda: self._engines.pause(in_flight))

    async def resume(self) -> None:
        """Let the engines sample again."""
        self.is_paused = False
        await self._change(self._engines.resume)

    async def load_weights(self, incoming: RemoteWeights) -> str:
        """Replace the weights of all engines, which drop everything computed from the old ones. Returns the
        acknowledgement of the weights, or the reason of a failure. The version stays the old one until `name_weights`
        sets another.
        """
        try:
            await self._change(lambda: self._load(incoming))
        except WeightSyncError as error:
            return str(error)
        return acknowledgement(incoming)

    def name_weights(self, version: int) -> None:
        """Set the version of the weights that the engines hold now."""
        self._versions[self._engines.weight_version] = version

    async def load(self) -> tuple[int, int]:
        """Current load of the engines: how many samples are running, and how many wait."""
        return self._engines.running, await self._engines.waiting()

    async def _load(self, incoming: RemoteWeights) -> None:
        if not self.is_paused:
            raise WeightSyncError("weights arrived before the engines were paused")
        count, before = len(self._engines.in_service), self._engines.weight_version
        if isinstance(incoming, BroadcastWeights | VLLMNativeWeights) and count > 1:
            raise WeightSyncError(f"{count} engines cannot act as one member of a group: send files")
        self._versions[before + 1] = self._versions[before]
        await self._engines.load_weights([incoming] * count, before + 1)

    async def _change(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Make one change at a time, and complete it even if this call is cancelled."""

        async def in_turn() -> None:
            async with self._changing:
                await change()

        task = asyncio.ensure_future(in_turn())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)
