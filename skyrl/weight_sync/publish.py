"""New weights for the engines, as one operation that leaves each engine with all of the new weights or all of the old,
or out of service.

    pause -> send, verified tensor by tensor -> caches dropped, version adopted -> canary -> resume
"""

from __future__ import annotations

from skyrl.errors import WeightSyncError
from skyrl.inference.client import InferenceEngineClient
from skyrl.weight_sync.canary import Canary, Metrics
from skyrl.weight_sync.roads import Road, WeightSource


class WeightSync:
    """Brings the learner's weights into the engines."""

    def __init__(self, source: WeightSource, client: InferenceEngineClient, road: Road, canary: Canary) -> None:
        self._source, self._client, self._road, self._canary = source, client, road, canary

    async def publish(self, version: int) -> Metrics:
        """Every engine samples from the learner's weights, as `version`, when this returns; how close they are, and how
        many are in service, is returned.

        Raises `WeightSyncError`. No token is sampled from weights that are not whole: an engine that was touched and
        not verified takes no work any more.
        """
        await self._client.pause()
        try:
            await self._road.carry(self._source, self._client, version)
        except WeightSyncError:
            await self._client.resume()  # who is still in service holds whole weights
            raise
        metrics = await self._client.inspect(lambda engines: self._canary.compare(self._source, engines, version))
        await self._client.resume()
        return metrics | self._client.metrics
