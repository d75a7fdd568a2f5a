"""Runs coroutines to their end from synchronous code, even if an event loop is running already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


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
