"""The road from learner to engines, as one operation that leaves an engine with all of the new weights or all of the
old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from skyrl.inference.client import InferenceEngineClient


class WeightSource(Protocol):
    """Whoever holds the newest weights."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Name and value of every weight, tied ones once."""


class WeightSync:
    """Brings the learner's weights into the engines of this process."""

    def __init__(self, source: WeightSource, client: InferenceEngineClient) -> None:
        self._source = source
        self._client = client

    async def publish(self, version: int) -> None:
        """Pause, send, adopt `version` with every cache of the old weights dropped, resume.

        Raises `WeightSyncError` if names or shapes do not match; the engines then still sample from the old weights.
        """
        await self._client.pause()
        try:
            await self._client.load_weights(self._source.weights(), version)
        finally:
            await self._client.resume()
