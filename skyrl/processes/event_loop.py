"""Between event loops and synchronous code: runs coroutines to their end, even if an event loop is running already, and
awaits blocking calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, and takes the result in any case

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised again where the call is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="skyrl-background", daemon=True).start()
    return await asyncio.wrap_future(future)
