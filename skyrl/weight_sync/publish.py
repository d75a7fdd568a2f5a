"""New weights for the engines, as one operation that leaves each engine with all of the new weights or all of the old,
or out of service.

    pause -> send, verified tensor by tensor -> caches dropped, version adopted -> canary -> resume
"""

from __future__ import annotations

from collections.abc import Callable

from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.client import InferenceEngineClient
from skyrl.weight_sync.canary import Canary, Metrics
from skyrl.weight_sync.transports import WeightSource, WeightTransport


class WeightSync:
    """Brings the learner's weights into the engines."""

    def __init__(
        self,
        source: WeightSource,
        client: InferenceEngineClient,
        transport: WeightTransport,
        canary: Canary,
        arrived: Callable[[int], None] = lambda version: None,
        interval: int = 1,
        canary_interval: int = 1,
    ) -> None:
        """`arrived` is called with each version that the engines sample from. Engines receive every `interval`th
        version, the first one there is, and versions that `catch_up` asks for. The canary compares after the first
        transfer, after every `canary_interval`th of the later ones, and after those that new engines take part in.
        """
        self._source, self._client, self._transport, self._canary = source, client, transport, canary
        self._arrived, self._interval = arrived, interval
        self._canary_interval = canary_interval
        self._newest, self._sent, self._transfers = 0, -1, 0

    async def publish(self, version: int) -> Metrics:
        """The learner's weights are of this version now; the engines get them where their turn has come."""
        self._newest = version
        went_back = version < self._sent  # to a checkpoint: the engines must not be ahead
        due = self._sent < 0 or went_back or version % self._interval == 0 or self.is_missing
        return await self._send() if due else self._client.metrics

    @property
    def is_behind(self) -> bool:
        """The engines hold older weights than the learner, or none."""
        return self._sent != self._newest or self.is_missing

    @property
    def is_missing(self) -> bool:
        """The engines gave up their weights while they slept: nothing may be sampled before they have some again."""
        return not self._client.holds_weights

    async def catch_up(self) -> None:
        """The engines have the learner's weights when this returns."""
        if self.is_behind:
            await self._send()

    async def send_again(self) -> None:
        """The engines have the weights of the newest version when this returns; called where the last one was lost and
        another one has taken its place, which has none.
        """
        await self._send()

    async def _send(self) -> Metrics:
        """Every engine samples from the learner's weights, as the newest version, when this returns; how close they
        are, and how many are in service, is returned.

        Raises `WeightSyncError`. No token is sampled from weights that are not whole: an engine that was touched and
        not verified takes no work any more.
        """
        version = self._newest
        await self._client.pause()
        metrics = await self._bring(version)
        self._transfers += 1
        self._sent = version
        self._arrived(version)
        await self._client.resume()
        return metrics | self._client.metrics

    async def _bring(self, version: int) -> Metrics:
        """Send and compare; where the last engine dies meanwhile, once more to the one that takes its place."""
        are_new = False
        while True:
            are_new = await self._client.admit_started() or are_new
            try:
                await self._send_to_those_left(version)
                if are_new or self._transfers % self._canary_interval == 0:
                    return await self._client.inspect(
                        lambda engines: self._canary.compare(self._source, engines, version)
                    )
                return {}
            except (ProcessError, WeightSyncError):
                if self._client.in_service:
                    raise

    async def _send_to_those_left(self, version: int) -> None:
        """A transfer in which one of several engines is lost begins again with the others, whichever end noticed it."""
        while True:
            serving = self._client.in_service
            try:
                return await self._transport.send(self._source, self._client, version)
            except (ProcessError, WeightSyncError) as error:
                if self._client.in_service not in (serving, ()):
                    continue
                if isinstance(error, WeightSyncError) and serving == self._client.in_service:
                    await self._client.resume()  # who is still in service holds whole weights
                raise
