"""A gate for work: it can be shut, and reports when no work is inside any more."""

from __future__ import annotations

import asyncio


class Gate:
    """Lets work in while it is open, and counts the work inside. Used on one event loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._opened, self._empty = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._empty.set()

    async def __aenter__(self) -> None:
        await self._opened.wait()
        self._inside += 1
        self._empty.clear()

    async def __aexit__(self, *_: object) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._empty.set()

    async def shut(self, *, keep: bool = False) -> None:
        """Admit no more work; return when no work is inside or, with `keep`, at once."""
        self._opened.clear()
        if not keep:
            await self._empty.wait()

    def open(self) -> None:
        """Admit waiting and later work."""
        self._opened.set()
