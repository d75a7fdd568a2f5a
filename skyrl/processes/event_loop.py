"""Running a coroutine to its end from code that is not asynchronous, also where an event loop runs already."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


def run_until_done(coroutine: Coroutine[Any, Any, R]) -> R:
    """The coroutine's result. Under a running event loop, such as a notebook's, it gets a loop in a thread of its own,
    and the caller's loop waits.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="skyrl-run") as thread:
        return thread.submit(asyncio.run, coroutine).result()
