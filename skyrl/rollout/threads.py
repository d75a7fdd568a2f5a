"""Threads for calls that may block: kept for the next call, and shared by calls that are over at once.

Most environments answer in microseconds, which is less than starting a thread takes, or changing to another one.
"""

from __future__ import annotations

import asyncio
import os
import time
from _thread import start_new_thread  # `Thread.start` would hold up the event loop until the thread runs
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

Job = Callable[[], None]
_Jobs = SimpleQueue[Job]

PATIENCE = 0.002
"""Seconds that a job waits for those before it, until it gets a thread of its own."""


class KeptThreads:
    """Runs functions in threads, each at once: in one that is idle, or else in a new one.

    A thread is never waited for and does not hold up the end of the program. What it runs must not raise.
    """

    def __init__(self, idle_seconds: float = 10.0) -> None:
        """A thread ends when it had nothing to do for so long."""
        self._idle: deque[_Jobs] = deque()
        self._idle_seconds = idle_seconds
        os.register_at_fork(after_in_child=self._idle.clear)  # a forked process has the list and not the threads

    def run(self, job: Job) -> None:
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


class SharedThread:
    """Runs the jobs of one turn of the event loop one after the other in one thread. Those that are left after
    `patience` seconds get a thread each, so that a job that blocks holds up no other.

    Belongs to one event loop at a time.
    """

    def __init__(self, threads: KeptThreads, patience: float = PATIENCE) -> None:
        self._threads, self._patience = threads, patience
        self._coming: deque[Job] = deque()

    def run(self, job: Job) -> None:
        """Begin the job at the end of this turn of the event loop. It must not raise."""
        if not self._coming:
            asyncio.get_running_loop().call_soon(self._begin)
        self._coming.append(job)

    def _begin(self) -> None:
        jobs, self._coming = self._coming, deque()
        if len(jobs) > 1:  # for jobs behind one that does not return
            asyncio.get_running_loop().call_later(self._patience, self._spread, jobs)
        self._threads.run(partial(self._work, jobs))

    def _work(self, jobs: deque[Job]) -> None:
        late = time.perf_counter() + self._patience
        while job := _taken(jobs):
            job()
            if time.perf_counter() > late:  # the event loop may have no time to notice it
                self._spread(jobs)

    def _spread(self, jobs: deque[Job]) -> None:
        while job := _taken(jobs):
            self._threads.run(job)


def _taken(jobs: deque[Job]) -> Job | None:
    with suppress(IndexError):  # several threads take from it
        return jobs.popleft()
    return None


class Mailbox:
    """Calls functions on the event loop for other threads. The loop is woken once for all that come before it looks."""

    def __init__(self) -> None:
        self._letters: deque[Job] = deque()
        self._woken = False

    def put(self, letter: Job, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop call `letter`, unless it is closed; from any thread. Letters must not raise."""
        self._letters.append(letter)
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._read)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._woken = False

    def _read(self) -> None:
        self._woken = False  # before it looks: what comes now wakes it again
        while letter := _taken(self._letters):
            letter()
