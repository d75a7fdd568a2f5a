"""Several policies on one base model: the torch engine with stored LoRA adapters, selected by the name in a request.

Every adapter has its own scheduler and cache. The base weights, and their prepared form, are in memory once. Adapters
are computed beside them, as in `skyrl.models.low_rank`, and never change.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from attrs import evolve

from skyrl.errors import ModelError, UserError, WeightSyncError
from skyrl.inference.adapters import apply_adapter, linear_layers, misfits, shared
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, InFlight
from skyrl.models.files.stored_adapter import stored_settings, stored_tensors
from skyrl.weight_receiver.incoming_weights import IncomingWeights

Model = TypeVar("Model", bound=Any)


class AdaptedEngine:
    """An `InferenceEngine` that combines one engine for the base model and one for each adapter, by name."""

    def __init__(self, base: InferenceEngine, adapted: Mapping[str, InferenceEngine]) -> None:
        self._base, self._adapted = base, dict(adapted)

    @property
    def weight_version(self) -> int:
        """Always 0: the engine keeps the weights that it started with."""
        return self._base.weight_version

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order, drawn by the adapter that the request names. Raises `UserError` for an
        unknown adapter.
        """
        if request.adapter is None:
            return await self._base.generate(request)
        if request.adapter not in self._adapted:
            raise UserError(f"there is no adapter {request.adapter}; loaded: {', '.join(self._adapted)}")
        return await self._adapted[request.adapter].generate(evolve(request, adapter=None))

    async def pause(self, in_flight: InFlight = "finish") -> None:
        """Returns when nothing is running."""
        await asyncio.gather(*(engine.pause(in_flight) for engine in self._engines))

    async def resume(self) -> None:
        """Takes work again."""
        await asyncio.gather(*(engine.resume() for engine in self._engines))

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        """Raises `WeightSyncError`: the adapters fit only the weights on which they were trained."""
        raise WeightSyncError(
            "an engine with several adapters takes no new weights: the adapters fit only the current ones"
        )

    async def load(self) -> EngineLoad | None:
        """Load of all engines: the number of samples that wait for places in a batch."""
        loads = await asyncio.gather(*(engine.load() for engine in self._engines))
        return EngineLoad(waiting=sum(load.waiting for load in loads if load is not None))

    async def sleep(self) -> bool:
        """Moves the models to host memory, where the weights are kept."""
        return any([await engine.sleep() for engine in self._engines])

    async def wake(self) -> None:
        """Moves the models back to their device."""
        for engine in self._engines:
            await engine.wake()

    async def close(self) -> None:
        """Finishes running requests and refuses later ones."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    @property
    def _engines(self) -> tuple[InferenceEngine, ...]:
        return (self._base, *self._adapted.values())


def with_stored_adapter(model: Model, name: str, folder: str) -> Model:
    """A copy of `model` with the adapter in this folder, which shares the parameters of `model`. Raises `ModelError` if
    the folder holds no adapter that fits.
    """
    where, place = f"adapter {name}", Path(folder).expanduser()
    settings = stored_settings(place, where)
    tensors = stored_tensors(place, where)
    adapter = shared(tuple(tensors.items()), rank=settings.rank, alpha=settings.alpha)
    if problems := misfits(adapter, linear_layers(model)):
        raise ModelError(f"{where}: {place} is not for this model: {problems}")
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, held)
    apply_adapter(twin, adapter)
    return twin
