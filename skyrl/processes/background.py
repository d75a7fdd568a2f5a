"""A blocking call awaited from a thread that nobody waits for at the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


async def in_a_daemon_thread(call: Callable[[], R]) -> R:
    """The result of `call`, or what it raises. Who is cancelled while it runs leaves the thread to itself."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody awaits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="skyrl-background", daemon=True).start()
    return await done
