"""Writing on a thread of its own, in order, so that the run does not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs jobs one after the other on one thread, which starts with the first of them.

    A job that raises is the last one that runs, so that no file has a gap, and every later call here raises what it
    raised. The queue has no bound of its own: a run bounds it to the samples of one step by `finished`.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it. Raises what an earlier one failed with."""
        if self._last is not None and self._last.done():
            self._last.result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="skyrl-writer")
        self._last = self._thread.submit(_after, self._last, job)

    def finish(self) -> None:
        """Return once every job is done. Raises what one of them failed with."""
        if self._last is not None:
            self._last.result()

    async def finished(self) -> None:
        """`finish`, while the event loop continues."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))  # who stops waiting does not stop the writing

    def close(self) -> None:
        """Wait for every job, and end the thread. What a job failed with is raised by `finish`, and not here."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _after(previous: Future[None] | None, job: Callable[[], None]) -> None:
    """Run `job` unless the one before it failed, whose exception is raised again."""
    if previous is not None:
        previous.result()
    job()
