"""Threads that are kept for the next call: starting one costs more than most environments take to answer."""

from __future__ import annotations

import os
from _thread import start_new_thread  # `Thread.start` would hold up the event loop until the thread runs
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

_Jobs = SimpleQueue[Callable[[], None]]


class KeptThreads:
    """Runs functions in threads, each at once: in one that is idle, or else in a new one.

    A thread is never waited for and does not hold up the end of the program. What it runs must not raise.
    """

    def __init__(self, idle_seconds: float = 10.0) -> None:
        """A thread ends when it had nothing to do for so long."""
        self._idle: deque[_Jobs] = deque()
        self._idle_seconds = idle_seconds
        os.register_at_fork(after_in_child=self._idle.clear)  # a forked process has the list and not the threads

    def run(self, job: Callable[[], None]) -> None:
        """Begin the job and return."""
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            start_new_thread(self._work, (jobs,))
        jobs.put(job)

    def _work(self, jobs: _Jobs) -> None:
        while True:
            try:
                job = jobs.get(timeout=self._idle_seconds)
            except Empty:
                with suppress(ValueError):  # `run` has just taken it out, and a job is on its way
                    self._idle.remove(jobs)
                    return
                continue
            job()
            del job  # what it holds may be large, and the next one may be long in coming
            self._idle.append(jobs)
