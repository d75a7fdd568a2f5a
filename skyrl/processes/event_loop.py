"""Between event loops and synchronous code: runs coroutines to their end, even if an event loop is running already, and
awaits blocking calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar


@contextmanager
def event_loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A function that runs a coroutine and returns its result. Under a running event loop, such as a notebook's, the
    coroutine gets a loop in a separate thread, and the caller's loop waits.
    """
    if not _is_running():
        yield asyncio.run
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="skyrl-run") as thread:
        yield lambda coroutine: thread.submit(asyncio.run, coroutine).result()


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


R = TypeVar("R")


async def run_in_daemon_thread(call: Callable[[], R]) -> R:
    """Run `call` in a daemon thread; returns its result or raises its error. Cancelling the await leaves it running."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001  # raised again where the call is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="skyrl-background", daemon=True).start()
    return await future
