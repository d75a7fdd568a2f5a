"""Engines behind the endpoint, as one training run controls them: paused, given new weights, named by their version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from attrs import evolve, frozen

from skyrl.errors import WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, InFlight
from skyrl.inference.incoming_weights import Broadcast, IncomingWeights, Native, RemoteWeights


@frozen(kw_only=True)
class Load:
    """How busy the engines are, in samples."""

    running: int
    waiting: int


class Engines(Protocol):
    """The engines behind the endpoint, used as one: `InferenceEngineClient`."""

    @property
    def in_service(self) -> Sequence[InferenceEngine]:
        """The engines that weights have to reach, in order."""

    @property
    def weight_version(self) -> int:
        """The one version that all of them sample from."""

    @property
    def running(self) -> int:
        """Samples that engines have been given and not returned."""

    async def waiting(self) -> int:
        """Samples that wait."""

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """The samples of a request."""

    async def pause(self, in_flight: InFlight | None = None) -> None:
        """Returns when nothing runs; later requests wait."""

    async def resume(self) -> None:
        """Take work again."""

    async def load_weights(self, incoming_sets: Sequence[IncomingWeights], version: int) -> None:
        """Give each engine its set of weights. Raises `WeightSyncError`."""


class EngineControl:
    """Lives on the event loop of the engines. A change is made to its end, also where nobody waits for it any more."""

    def __init__(self, engines: Engines, *, workers: int) -> None:
        """`workers`: processes of an engine that take weights."""
        self._engines, self.workers = engines, workers
        self._versions = {engines.weight_version: 0}
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self.is_paused = False
        """Whether a pause was asked for, and no end of it."""

    @property
    def version(self) -> int:
        """Version of the weights, as the run counts it."""
        return self._versions[self._engines.weight_version]

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Draw the samples of a request; the versions of their weights are the run's. Raises as the engines do."""
        drawn = await self._engines.generate(request)
        return tuple(
            evolve(each, weight_versions=tuple(self._versions[version] for version in each.weight_versions))
            for each in drawn
        )

    async def pause(self, in_flight: InFlight) -> None:
        """Returns when nothing runs; later requests wait."""
        self.is_paused = True
        await self._change(lambda: self._engines.pause(in_flight))

    async def resume(self) -> None:
        """Draw samples again."""
        self.is_paused = False
        await self._change(self._engines.resume)

    async def load_weights(self, incoming: RemoteWeights) -> str:
        """Replace the weights of all engines, which drops what was computed from the old ones; empty, or why that
        failed. They have the old version until they are given another.
        """
        try:
            await self._change(lambda: self._load(incoming))
        except WeightSyncError as error:
            return str(error)
        return ""

    def name_weights(self, version: int) -> None:
        """The weights that the engines hold are of this version."""
        self._versions[self._engines.weight_version] = version

    async def load(self) -> Load:
        """How busy the engines are now."""
        return Load(running=self._engines.running, waiting=await self._engines.waiting())

    async def _load(self, incoming: RemoteWeights) -> None:
        if not self.is_paused:
            raise WeightSyncError("weights came before the engines were paused")
        count, before = len(self._engines.in_service), self._engines.weight_version
        if isinstance(incoming, Broadcast | Native) and count > 1:
            raise WeightSyncError(f"{count} engines cannot take the place of one in a group: send files")
        self._versions[before + 1] = self._versions[before]
        await self._engines.load_weights([incoming] * count, before + 1)

    async def _change(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One change after the other."""

        async def in_turn() -> None:
            async with self._changing:
                await change()

        task = asyncio.ensure_future(in_turn())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)
