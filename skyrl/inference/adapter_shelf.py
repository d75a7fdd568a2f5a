"""The adapters of an engine by name: all of them in files, a bounded number of them loaded.

    publish --> files --load, for a request--> loaded --unload, least recently used--> files --> loaded again
                                                 |
                                           in use by requests, and then never unloaded

Requests wait while all loaded adapters are in use and another one is needed, in the order in which they came. Used on
one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

from attrs import define

from skyrl.errors import UserError
from skyrl.inference.adapters import write_adapter
from skyrl.inference.engine import refuse_adapter
from skyrl.weight_receiver.incoming_weights import Adapter

T = TypeVar("T")

FIRST_NUMBER = 2
"""Number of the first adapter: engines know their policy's own as 1."""


@define(eq=False, kw_only=True)
class _Entry(Generic[T]):
    number: int
    folder: Path
    loaded: T | None = None
    requests: int = 0
    """Number of requests that name the adapter, including those that wait for it."""

    users: int = 0
    """Number of requests that use the adapter: until it is 0, the adapter stays loaded."""


class AdapterShelf(Generic[T]):
    """Adapters by name. `T` is what a loaded one is to the engine."""

    def __init__(
        self,
        most_loaded: int,
        load: Callable[[int, str, Path], Awaitable[T]],
        unload: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """At most `most_loaded` are loaded; with 0, there never are any. `load` gets a number that no other adapter has
        had, the name, and a folder in PEFT's format; `unload` gets the number. Without it, an adapter that nobody holds
        takes no memory.
        """
        self._most, self._load, self._unload = most_loaded, load, unload
        self.by_name: dict[str, _Entry[T]] = {}
        """All adapters."""
        self._resident: OrderedDict[int, _Entry[T]] = OrderedDict()
        """Loaded adapters by number, the least recently used first; forgotten ones too while samples are drawn."""
        self._numbers = itertools.count(FIRST_NUMBER)
        self._files: TemporaryDirectory[str] | None = None
        self._turn, self._released = asyncio.Lock(), asyncio.Event()

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Adds an adapter, which has to fit the model. Raises `UserError` if there is one of this name, or no room for
        any.
        """
        self._refuse(name)
        if self._files is None:
            self._files = TemporaryDirectory(prefix="skyrl-adapters-")
        number = next(self._numbers)
        folder = Path(self._files.name, str(number))
        await asyncio.to_thread(write_adapter, adapter, folder)
        self._refuse(name)
        self.by_name[name] = _Entry(number=number, folder=folder)

    def add_stored(self, name: str, folder: Path) -> None:
        """Adds the adapter in this folder, which has to stay there. Raises as `add_adapter`."""
        self._refuse(name)
        self.by_name[name] = _Entry(number=next(self._numbers), folder=folder.expanduser())

    async def remove_adapter(self, name: str) -> None:
        """Forgets an adapter: later requests are refused, and it is unloaded once running ones have ended. Raises
        `UserError` for an unknown name.
        """
        entry = self._entry(name)
        del self.by_name[name]
        while entry.requests:
            await self._wait_for_release()
        async with self._turn:
            await self._unloaded(entry)
        if self._files is not None and entry.folder.parent == Path(self._files.name):
            await asyncio.to_thread(shutil.rmtree, entry.folder, ignore_errors=True)

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[T]:
        """The loaded adapter of this name, which stays loaded meanwhile. Raises `UserError` for an unknown name."""
        entry = self._entry(name)
        entry.requests += 1
        try:
            if entry.loaded is None or self._turn.locked():
                bringing = asyncio.ensure_future(self._bring(entry, name))
                try:
                    await asyncio.shield(bringing)
                except asyncio.CancelledError:  # the load is finished all the same: what is loaded stays known
                    bringing.add_done_callback(
                        lambda future: None if future.cancelled() or future.exception() else self._release(entry)
                    )
                    raise
            else:
                entry.users += 1
            try:
                self._resident.move_to_end(entry.number)
                assert entry.loaded is not None
                yield entry.loaded
            finally:
                self._release(entry)
        finally:
            entry.requests -= 1
            self._released.set()

    def close(self) -> None:
        """Deletes the files."""
        if self._files is not None:
            self._files.cleanup()

    def _entry(self, name: str) -> _Entry[T]:
        if not self._most:
            refuse_adapter(name)
        if name not in self.by_name:
            raise UserError(f"there is no adapter {name}; loaded: {', '.join(self.by_name) or 'none'}")
        return self.by_name[name]

    def _refuse(self, name: str) -> None:
        if not self._most:
            raise UserError(f"this engine takes no adapter {name}: it was started without adapters")
        if name in self.by_name:
            raise UserError(f"there is an adapter {name} already: choose another name")

    async def _bring(self, entry: _Entry[T], name: str) -> None:
        """Loads an adapter in its turn, unless that is done or nobody waits for it any more, and keeps it loaded."""
        async with self._turn:
            if entry.loaded is None and entry.requests:
                while len(self._resident) >= self._most:
                    idle = next((item for item in self._resident.values() if not item.users), None)
                    if idle is None:
                        await self._wait_for_release()
                    else:
                        await self._unloaded(idle)
                entry.loaded = await self._load(entry.number, name, entry.folder)
                self._resident[entry.number] = entry
            entry.users += 1

    def _release(self, entry: _Entry[T]) -> None:
        entry.users -= 1
        self._released.set()

    async def _unloaded(self, entry: _Entry[T]) -> None:
        if entry.loaded is not None:
            entry.loaded = None
            if self._unload is not None:
                await self._unload(entry.number)
            del self._resident[entry.number]

    async def _wait_for_release(self) -> None:
        self._released.clear()
        await self._released.wait()
