"""Threads for calls that may block: kept for later calls, and shared by calls that return at once.

    Workers.run(call) --> a thread of KeptThreads --> Mailbox.put(result) --> event loop

Most environments answer in microseconds, which is less than it takes to start a thread or to switch to another one.
"""

from __future__ import annotations

import asyncio
import os
import time
from _thread import start_new_thread  # `Thread.start` would hold up the event loop until the thread runs
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock

from attrs import define, field

Job = Callable[[], object]
_Jobs = SimpleQueue[Job]

PATIENCE = 0.002
"""Seconds for which calls share one thread before the waiting ones spread over more."""


class KeptThreads:
    """Runs each function immediately, in an idle thread or else in a new one.

    A thread is never waited for and does not delay the end of the program. Functions must not raise.
    """

    def __init__(self, idle_seconds: float = 10.0) -> None:
        """A thread ends after `idle_seconds` without work."""
        self._idle: deque[_Jobs] = deque()
        self._idle_seconds = idle_seconds
        os.register_at_fork(after_in_child=self._idle.clear)  # a forked process inherits the list but not the threads

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
            del job  # it may hold large objects until the next job comes
            self._idle.append(jobs)


@define(eq=False)
class ThreadCall:
    """A function that a thread calls."""

    run: Job
    begun: float | None = field(default=None, init=False)
    """Time by the event loop's clock at which a thread took it; None while it waits."""

    _turn: _Turn | None = field(default=None, init=False)
    """The turn of a thread in which it runs; None before and after."""


@define(eq=False)
class _Turn:
    """Calls that one thread runs one after the other."""

    is_over: bool = False
    """Whether another thread has replaced this one, which ends with its current call, if that ever ends."""


class Workers:
    """Runs calls in at most `most` threads at a time, in the order in which they came.

    Calls that come in one turn of the event loop share a thread as long as they are quick: after `PATIENCE`, the
    remaining ones spread over all threads that are free. Belongs to one event loop at a time.
    """

    def __init__(self, threads: KeptThreads, most: int) -> None:
        self._threads, self._free = threads, most
        self._waiting: deque[ThreadCall] = deque()
        self._lock = Lock()
        self._begins = False
        self._clock: Callable[[], float] = time.monotonic

    def run(self, call: ThreadCall) -> None:
        """Begin the call at the end of this turn of the event loop, or when a thread is free. It must not raise."""
        self._waiting.append(call)
        if not self._begins:
            self._begins, loop = True, asyncio.get_running_loop()
            self._clock = loop.time
            loop.call_soon(self._begin)

    def give_up(self, call: ThreadCall) -> None:
        """Withdraw a waiting call, or abandon the thread of a running one, which then no longer counts as busy."""
        with self._lock:
            if call.begun is None:
                self._waiting.remove(call)
            elif call._turn is not None:
                call._turn.is_over = True
                self._free += 1
        self._spread()

    def _begin(self) -> None:
        self._begins = False
        self._start(1)
        if self._waiting:  # behind a call that may not return
            asyncio.get_running_loop().call_later(PATIENCE, self._spread)

    def _spread(self) -> None:
        self._start(len(self._waiting))

    def _start(self, number: int) -> None:
        """Let up to `number` more threads work, if there are calls for them."""
        with self._lock:
            number = min(number, len(self._waiting), self._free)
            self._free -= number
        for _ in range(number):
            self._threads.run(self._work)

    def _work(self) -> None:
        turn, late = _Turn(), time.monotonic() + PATIENCE
        call = self._next(turn)
        while call is not None:
            call.run()
            if time.monotonic() > late:  # the event loop may have no time to notice it
                self._spread()
            call = self._next(turn, call)

    def _next(self, turn: _Turn, done: ThreadCall | None = None) -> ThreadCall | None:
        """The call that a thread runs after the one that is done; None ends its turn."""
        with self._lock:
            if done is not None:
                done._turn = None
            if turn.is_over:
                return None
            if not self._waiting:
                self._free += 1
                return None
            call = self._waiting.popleft()
            call.begun, call._turn = self._clock(), turn
            return call


class Mailbox:
    """Calls functions on the event loop for other threads. The loop is woken once for all that come before it runs."""

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
            except RuntimeError:  # the loop is closed: nothing waits for it
                self._woken = False

    def _read(self) -> None:
        self._woken = False  # first, so that a letter that arrives meanwhile wakes the loop again
        while self._letters:
            self._letters.popleft()()
