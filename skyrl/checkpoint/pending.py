"""Saves in the background: at most one at a time. The next operation raises the error of a failed save."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class PendingSave:
    """The background save in progress, if there is one."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    async def start(self, save: Coroutine[Any, Any, Any]) -> None:
        """Begin a save once the previous one has ended. If that one failed, raises its error and begins nothing."""
        try:
            await self.finish()
        except BaseException:
            save.close()
            raise
        self._task = asyncio.ensure_future(save)
        await asyncio.sleep(0)  # the save begins now, not when the run next awaits something

    async def finish(self) -> None:
        """Return when no save is in progress. If the last save failed, raises its error, once."""
        task = self._task
        if task is None:
            return
        try:
            await asyncio.shield(task)  # cancelling the caller does not cancel the save
        finally:
            if task.done():
                self._task = None

    async def finish_after(self, error: BaseException) -> None:
        """Finish the save of a run that has failed with `error`, which the caller raises. An error of the save that
        differs from it is logged.
        """
        try:
            await self.finish()
        except Exception as second:  # noqa: BLE001 - the run's own failure is what its user has to see
            if str(second) != str(error):
                _log.error("%s (and the run itself ended with %s)", second, type(error).__name__)
