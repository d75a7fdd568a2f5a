"""Transports of LoRA adapters to engines that already hold the base weights: only the adapter is sent.

This includes the first transfer of a run: engines load the base weights themselves, and the canary verifies what they
compute.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import WeightSyncError
from skyrl.inference.adapters import Adapter, shared
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.processes.own_folder import make_own_folder
from skyrl.weight_receiver.incoming_weights import Broadcast, Folder, IncomingWeights, WeightInfo
from skyrl.weight_sync.senders import BroadcastSender, FolderSender
from skyrl.weight_sync.transports import TransferRendezvous, WeightSource, send_both

DTYPE = "float32"
"""Dtype in which adapters are sent, the one in which they are trained."""


class SharedAdapterTransport:
    """Learner and engines are in this process: an engine copies from the learner's own tensors."""

    def __init__(self, lora: SkyRLLoraConfig) -> None:
        self._lora = lora

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        tensors = await source.stream(tuple, adapter=True)
        adapter = shared(tensors, rank=self._lora.rank, alpha=self._lora.alpha)
        await client.load_weights([adapter] * len(client.in_service), version)


class BroadcastAdapterTransport:
    """The learner's first rank sends the adapter to all engines at once over gloo."""

    def __init__(self, place: TransferRendezvous, lora: SkyRLLoraConfig) -> None:
        """One process of each engine joins the groups that `place` creates."""
        self._place, self._lora = place, lora

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        infos = await _infos(source)
        here, there = self._place.call(len(client.in_service))
        incoming = [self._adapter(Broadcast(group=group, weights=infos)) for group in there]
        await send_both(
            client.load_weights(incoming, version, here.abort),
            source.stream(BroadcastSender(group=here, dtype=DTYPE), adapter=True),
            here.abort,
        )

    def _adapter(self, tensors: IncomingWeights) -> Adapter:
        return Adapter(tensors=tensors, rank=self._lora.rank, alpha=self._lora.alpha)


class FolderAdapterTransport:
    """The learner writes the adapter to files that the engines read."""

    def __init__(self, path: Path, lora: SkyRLLoraConfig) -> None:
        """`path`: a folder that learner and engines see under this name."""
        self._path, self._lora = path, lora

    async def send(self, source: WeightSource, client: InferenceEngineClient, version: int) -> None:
        infos = await _infos(source)
        try:
            await asyncio.to_thread(make_own_folder, self._path)
            with tempfile.TemporaryDirectory(dir=self._path, prefix=f"version-{version}-") as folder:
                await source.stream(FolderSender(path=folder, dtype=DTYPE), adapter=True)
                tensors = Folder(path=folder, weights=infos)
                adapter = Adapter(tensors=tensors, rank=self._lora.rank, alpha=self._lora.alpha)
                await client.load_weights([adapter] * len(client.in_service), version)
        except OSError as error:
            raise WeightSyncError(f"the adapter cannot be written to {self._path}: {error}") from error


async def _infos(source: WeightSource) -> tuple[WeightInfo, ...]:
    shapes = await source.shapes(adapter=True)
    return tuple(WeightInfo(name=name, shape=tuple(shape), dtype=DTYPE) for name, shape in shapes)
