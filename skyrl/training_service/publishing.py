"""Snapshots that the engines hold, bounded in number: one that is needed is loaded from its folder."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from skyrl.training_service.backend import Backend


class PublishedSnapshots:
    """Published snapshots, by the names of their folders, the one used longest ago first."""

    def __init__(self, backend: Backend, folder: Path, computing: asyncio.Lock, most: int) -> None:
        """`computing` is held while the backend computes anything but samples."""
        self._backend, self._folder, self._computing, self._most = backend, folder, computing, most
        self._published: OrderedDict[str, None] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._released = asyncio.Event()

    def __len__(self) -> int:
        return len(self._published)

    async def publish(self, model_id: str, name: str) -> None:
        """Publish a model's weights under a name, if there is room; otherwise they are published when they are used.
        The caller holds `computing`.
        """
        if await self._make_room():
            await self._backend.publish(model_id, name)
            self._published[name] = None

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[None]:
        """Keep a snapshot published for the duration of the block; None is the base model, which always is."""
        if name is None:
            yield
            return
        self._users[name] += 1
        try:
            await self._ensure(name)
            yield
        finally:
            self._users[name] -= 1
            self._released.set()

    async def keep_only(self, names: Collection[str]) -> None:
        """Unpublish everything else that nobody uses."""
        async with self._computing:
            for name in [item for item in self._published if item not in names and not self._users[item]]:
                await self._unpublish(name)

    async def _ensure(self, name: str) -> None:
        while True:
            async with self._computing:
                if name not in self._published and await self._make_room():
                    await self._backend.publish_stored(self._folder / name, name)
                    self._published[name] = None
                if name in self._published:
                    self._published.move_to_end(name)
                    return
                self._released.clear()
            await self._released.wait()

    async def _make_room(self) -> bool:
        if len(self._published) < self._most:
            return True
        idle = next((name for name in self._published if not self._users[name]), None)
        if idle is None:
            return False
        await self._unpublish(idle)
        return True

    async def _unpublish(self, name: str) -> None:
        await self._backend.unpublish(name)
        del self._published[name]
