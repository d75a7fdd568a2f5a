"""Weight transfer to the engines as one operation, which leaves each engine with all of the new weights, all of the
old ones, or out of service.

    pause -> send, verified tensor by tensor -> caches dropped, version adopted -> canary -> resume
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.weight_sync.canary import Canary, Metrics
from skyrl.weight_sync.transports import WeightSource, WeightTransport

P = ParamSpec("P")
R = TypeVar("R")


class WeightSync:
    """Transfers the learner's weights to the engines."""

    def __init__(
        self,
        source: WeightSource,
        client: InferenceEngineClient,
        transport: WeightTransport,
        canary: Canary,
        on_version: Callable[[int], None] = lambda version: None,
        interval: int = 1,
        canary_interval: int = 1,
        until_stopped: Callable[[Awaitable[object]], Awaitable[bool]] | None = None,
    ) -> None:
        """`on_version` is called with each version from which the engines now sample. Engines receive the first
        version, every version divisible by `interval`, and those that `catch_up` requests. The canary compares after
        the first transfer, after every `canary_interval`th later one, after every transfer in which new engines take
        part, after one that had to be repeated, and after each one that engines only promise to have loaded.
        `until_stopped` waits for a transfer, and gives it up if the run has to stop before it is done.
        """
        self._source, self._client, self._transport, self._canary = source, client, transport, canary
        self._on_version, self._interval = on_version, interval
        self._canary_interval, self._until_stopped = canary_interval, until_stopped
        self._newest, self._sent_version, self._transfers = 0, -1, 0
        self._must_compare = False  # engines are new, or may have received a part of the weights twice

    async def publish(self, version: int) -> Metrics:
        """Announce that the learner's weights now are `version`, and transfer them if a transfer is due."""
        self._newest = version
        went_back = version < self._sent_version  # to a checkpoint: the engines must not be ahead of it
        due = self._sent_version < 0 or went_back or version % self._interval == 0 or self.weights_discarded
        return await self._send() if due else self._client.metrics

    @property
    def is_behind(self) -> bool:
        """Whether the engines hold older weights than the learner, or none."""
        return self._sent_version != self._newest or self.weights_discarded

    @property
    def weights_discarded(self) -> bool:
        """Whether the engines discarded their weights to sleep: nothing may be sampled before they receive new ones."""
        return not self._client.holds_weights

    async def catch_up(self) -> None:
        """Transfer the learner's weights unless the engines already hold them."""
        if self.is_behind:
            await self._send()

    async def send_again(self) -> None:
        """Transfer the newest version, whatever the engines hold. Called when the last engine was lost and replaced by
        a new one, which does not have the weights yet.
        """
        await self._send()

    async def _send(self) -> Metrics:
        """Transfer the learner's weights, as the newest version, to every engine. Returns the metrics of the canary and
        of the engines.

        Raises `WeightSyncError`. No token is sampled from incomplete weights: an engine whose weights were changed but
        not verified takes no more work.
        """
        metrics: Metrics = {}

        # The order matters: an engine that samples between the transfer and the canary could give tokens of weights
        # that nobody has verified, and `on_version` counts a version only when all engines sample from it.
        async def transfer() -> None:
            version = self._newest
            await self._client.pause()
            metrics.update(await self._send_and_compare(version))
            self._transfers += 1
            self._sent_version = version
            self._on_version(version)
            await self._client.resume()

        # If it is given up, the run is to stop, and needs no more samples.
        await (transfer() if self._until_stopped is None else self._until_stopped(transfer()))
        return metrics | self._client.metrics

    async def _send_and_compare(self, version: int) -> Metrics:
        """Send and compare. If the last engine dies meanwhile, start again with the engine that replaces it."""
        while True:
            self._must_compare = await self._client.admit_started() or self._must_compare
            try:
                await self._send_to_those_left(version)
                metrics: Metrics = {}
                if self._must_compare or self._client.only_promised or self._transfers % self._canary_interval == 0:
                    metrics = await self._client.inspect(lambda engines: self._compare(engines, version))
                self._must_compare = False
                return metrics
            except (ProcessError, WeightSyncError):
                if self._client.in_service:
                    raise

    async def _compare(self, engines: Mapping[int, InferenceEngine], version: int) -> Metrics:
        promised = self._client.only_promised
        return await self._canary.compare(self._source, engines, version, promised=promised)

    async def _send_to_those_left(self, version: int) -> None:
        """Send to the engines in service. If one of several is lost, on either end's report, start again without it."""
        while True:
            serving = self._client.in_service
            try:
                return await self._transport.send(self._source, self._client, version)
            except (ProcessError, WeightSyncError) as error:
                self._must_compare = True
                if self._client.in_service not in (serving, ()):
                    continue
                if isinstance(error, WeightSyncError) and serving == self._client.in_service:
                    await self._client.resume()  # one that stopped halfway refuses to sample, and says so
                raise


class ReplacementSync:
    """Transfers weights to an engine that replaces the last one, while a call waits for samples, which then go on.

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
