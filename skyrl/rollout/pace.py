"""Starts calls at a steady rate, for services that limit how many they take."""

from __future__ import annotations

import asyncio


class Pace:
    """Admits callers at `per_second` on average, after an initial burst of one second's worth."""

    def __init__(self, per_second: float | None) -> None:
        """`per_second` is the rate of starts; None lets every caller through at once."""
        self._rate = per_second
        self._burst = max(1.0, per_second or 1.0)
        self._free_at = float("-inf")
        """Time by the loop's clock at which the next caller could start if no burst were allowed."""

    async def __call__(self) -> None:
        """Return when the caller may start; callers are let through in the order in which they came."""
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - (self._burst - 1) / self._rate)
        wait = self._free_at - now
        self._free_at += 1 / self._rate
        if wait > 0:
            await asyncio.sleep(wait)
