"""Several engines behind one door: requests go to the least loaded one, everything else to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine


@runtime_checkable
class Closable(Protocol):
    """An engine that holds something to give back: a thread, a process, a connection."""

    async def close(self) -> None:
        """Finishes what is running and refuses what comes later."""


class InferenceEngineClient:
    """The engines of a run, used as one. All of them hold the same model."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        tokenizer: Any,
        model_path: str,
        lora_cfg: SkyRLLoraConfig,
        inference_engine_config: InferenceEngineConfig,
    ) -> None:
        assert engines, "an inference client needs at least one engine"
        self.engines = tuple(engines)
        self.tokenizer, self.model_path = tokenizer, model_path
        self.lora_cfg, self.inference_engine_config = lora_cfg, inference_engine_config
        self._samples = [0] * len(self.engines)

    @property
    def weight_version(self) -> int:
        """The one version that every engine samples from. Raises `WeightSyncError` when they differ."""
        versions = [engine.weight_version for engine in self.engines]
        if len(set(versions)) > 1:
            raise WeightSyncError(f"the engines hold different weights: versions {versions}, in order of engines")
        return versions[0]

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """All samples of a request come from one engine, the one with the fewest samples in flight."""
        chosen = self._samples.index(min(self._samples))
        self._samples[chosen] += len(request.keys)
        try:
            return await self.engines[chosen].generate(request)
        finally:
            self._samples[chosen] -= len(request.keys)

    async def pause(self) -> None:
        """Returns when nothing runs on any engine."""
        await _all(engine.pause() for engine in self.engines)

    async def resume(self) -> None:
        """Lets every engine take work again."""
        await _all(engine.resume() for engine in self.engines)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Gives every engine the weights.

        When one refuses, that is raised after the others have finished, and `weight_version` raises until all agree.
        """
        shared = weights if len(self.engines) == 1 else list(weights)
        await _all(engine.load_weights(shared, version) for engine in self.engines)

    async def close(self) -> None:
        """Closes every engine that can be closed."""
        await _all(engine.close() for engine in self.engines if isinstance(engine, Closable))


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for every call, then raises the first error there was."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
