"""Checks that an inference server gives signs of life while anything is asked of it, however long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from skyrl.errors import ProcessError

T = TypeVar("T")


class Pulse:
    """Ends every guarded call if the server gives no sign of life. Used on one event loop."""

    def __init__(
        self,
        name: str,
        sign: Callable[[float], Awaitable[object]],
        *,
        seconds: float,
        has_started: Callable[[], bool] = lambda: True,
    ) -> None:
        """`sign` asks the server for a sign of life, within the number of seconds that it is given: `seconds`. It is
        called at intervals of a quarter of `seconds`, and counts once the server `has_started`.
        """
        self._name, self._sign, self._seconds, self._has_started = name, sign, seconds, has_started
        self._calls = 0
        self._watch: asyncio.Task[None] | None = None

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result. Raises `ProcessError` if the server gives no sign of life meanwhile."""
        self._calls += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_signs())
        watch, task = self._watch, asyncio.ensure_future(call)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return await task
        finally:
            self._calls -= 1
            if not self._calls:
                self._watch.cancel()
                self._watch = None  # the cancelled task ends only later, and would end a call that begins meanwhile
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch_signs(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 4)
            try:
                await self._sign(self._seconds)
            except ProcessError as error:
                if not self._has_started():
                    continue
                raise ProcessError(
                    f"the inference server {self._name} gave no sign of life for {self._seconds:g} s: {error}"
                ) from error
