"""Saves in the background: at most one at a time, whose error is raised by the next operation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class PendingSave:
    """The save that is under way, if one is."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    async def start(self, save: Coroutine[Any, Any, Any]) -> None:
        """Begin a save, after the one before it has ended. Raises what that one failed with, and begins nothing."""
        try:
            await self.finish()
        except BaseException:
            save.close()
            raise
        self._task = asyncio.ensure_future(save)
        await asyncio.sleep(0)  # it begins now, and not when the run next has to wait for something

    async def finish(self) -> None:
        """Return when no save is under way. Raises what the last one failed with, once."""
        task = self._task
        if task is None:
            return
        try:
            await asyncio.shield(task)  # whoever is told to stop waiting does not stop the save
        finally:
            if task.done():
                self._task = None

    async def finish_after(self, error: BaseException) -> None:
        """Finish a save where the run has already failed with `error`, which is raised; a failure of the save that has
        another cause is logged.
        """
        try:
            await self.finish()
        except Exception as second:  # noqa: BLE001 - the run's own failure is what its user has to see
            if str(second) != str(error):
                _log.error("%s (and the run itself ended with %s)", second, type(error).__name__)
