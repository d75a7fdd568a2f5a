"""Writing in order on a separate thread, so that the run does not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs jobs one after the other on one thread, which starts with the first job.

    After a job raises, no further job runs, so that no file has a gap, and every later call raises the same exception.
    The queue is unbounded: a run limits it to the samples of one step by awaiting `finished`.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Queue `job`. Raises the exception of an earlier job that failed."""
        if self._last is not None and self._last.done():
            self._last.result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="skyrl-writer")
        self._last = self._thread.submit(_after, self._last, job)

    def finish(self) -> None:
        """Return once every job is done. Raises the exception of a job that failed."""
        if self._last is not None:
            self._last.result()

    async def finished(self) -> None:
        """Wait like `finish`, without blocking the event loop."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))  # cancelling the wait does not cancel the writing

    def close(self) -> None:
        """Wait for every job, and end the thread. The exception of a failed job is raised by `finish`, not here."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _after(previous: Future[None] | None, job: Callable[[], None]) -> None:
    """Run `job`, unless the job before it failed: then raise that exception again."""
    if previous is not None:
        previous.result()
    job()
