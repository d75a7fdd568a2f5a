"""Awaits a blocking call in a thread that does not delay the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


async def in_a_daemon_thread(call: Callable[[], R]) -> R:
    """Run `call` in a daemon thread; returns its result or raises its error. Cancelling the await leaves it running."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001  # raised again where the call is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="skyrl-background", daemon=True).start()
    return await done
