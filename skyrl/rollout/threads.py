"""Threads for calls that may block: kept for later calls, and shared by calls that return at once.

    Workers.run(call) --> a thread of KeptThreads --> Mailbox.put(result) --> event loop

Most environments answer in microseconds, which is less than it takes to start a thread or to switch to another one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from _thread import start_new_thread  # `Thread.start` would hold up the event loop until the thread runs
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from attrs import define, field

Job = Callable[[], object]
_Jobs = SimpleQueue[Job]

PATIENCE = 0.002
"""Seconds after which calls that still wait get one more thread, or twice as many if no call was taken meanwhile."""


FEW = 64
"""Number of threads up to which the interpreter switches between them as often as it always does."""

_SWITCH_SECONDS = sys.getswitchinterval()


class KeptThreads:
    """Runs each function immediately, in an idle thread or else in a new one.

    A thread is never waited for and does not delay the end of the program. Functions must not raise. A thread that
    waits for the interpreter wakes at every switch interval to ask for it, which takes all processors where thousands
    wait: with more than `FEW` threads, the interval grows with their number.
    """

    def __init__(self, idle_seconds: float = 10.0) -> None:
        """A thread ends after `idle_seconds` without work."""
        self._idle: deque[_Jobs] = deque()
        self._idle_seconds = idle_seconds
        self._alive, self._counting = 0, Lock()
        os.register_at_fork(after_in_child=self._forget)  # a forked process inherits the list but not the threads

    def run(self, job: Job) -> None:
        """Begin the job and return."""
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            self._count(1)
            start_new_thread(self._work, (jobs,))
        jobs.put(job)

    def _work(self, jobs: _Jobs) -> None:
        while True:
            try:
                job = jobs.get(timeout=self._idle_seconds)
            except Empty:
                with suppress(ValueError):  # `run` has just taken it out, and a job is on its way
                    self._idle.remove(jobs)
                    self._count(-1)
                    return
                continue
            job()
            del job  # it may hold large objects until the next job comes
            self._idle.append(jobs)

    def _count(self, change: int) -> None:
        with self._counting:
            self._alive += change
            sys.setswitchinterval(_SWITCH_SECONDS * max(1.0, self._alive / FEW))

    def _forget(self) -> None:
        self._idle.clear()
        self._alive, self._counting = 0, Lock()


@define(eq=False)
class ThreadCall:
    """A call of a function, which must not raise, in a thread."""

    function: Callable[..., Any]
    start_time: float | None = field(default=None, init=False)
    """Time by the event loop's clock at which a thread took it; None while it waits."""

    is_over: bool = field(default=False, init=False)
    """Whether it has returned, and its place is free."""

    goes_on: bool = field(default=False, init=False)
    """Whether it continues outside its thread, in its place, until `Workers.ended`."""

    def run(self) -> None:
        """Call the function."""
        self.function()


class Workers:
    """Runs at most `most` calls at a time, in the order in which they came, in no more threads than that.

    Calls that come in one turn of the event loop share a thread as long as they are quick. Threads are added one by one
    while calls wait, and by doubling while all threads stand still: thousands that wake at once would keep each other
    from working. Belongs to one event loop at a time.
    """

    def __init__(self, threads: KeptThreads, most: int) -> None:
        self._threads, self._free, self.most = threads, most, most
        self._waiting: deque[ThreadCall] = deque()
        self._given_up: set[ThreadCall] = set()
        self._lock = Lock()
        self._begins = self._is_watched = False
        self._taken = self._taken_before = 0  # calls, until now and until threads were added last
        self._added_at = 0.0
        self._clock: Callable[[], float] = time.monotonic

    def run(self, call: ThreadCall) -> None:
        """Begin the call at the end of this turn of the event loop, or when a place is free."""
        self._waiting.append(call)
        if not self._begins:
            self._begins, loop = True, asyncio.get_running_loop()
            self._clock = loop.time
            loop.call_soon(self._begin)

    def give_up(self, call: ThreadCall) -> None:
        """Withdraw a waiting call. A running one cannot be ended, and keeps its place until it returns."""
        with self._lock:
            if call.start_time is None:
                self._waiting.remove(call)
            elif not call.is_over:
                self._given_up.add(call)

    @property
    def are_given_up(self) -> bool:
        """Whether all places belong to calls that were given up and have not returned."""
        return len(self._given_up) >= self.most

    def release(self, call: ThreadCall) -> None:
        """Free the place of a call that went on outside its thread; from any thread."""
        with self._lock:
            self._leave(call)
            self._free += 1
        self._start(1)

    def _begin(self) -> None:
        self._begins = False
        self._start(1)
        self._watch()

    def _watch(self) -> None:
        """Add threads every `PATIENCE` while calls wait, which may be behind one that does not return."""
        if self._waiting and self._free and not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().call_later(PATIENCE, self._look)

    def _look(self) -> None:
        self._is_watched = False
        self._add()
        self._watch()

    def _add(self) -> None:
        """Let more threads work for the calls that wait."""
        stands_still = self._taken == self._taken_before
        self._taken_before, self._added_at = self._taken, time.monotonic()
        self._start(max(1, self.most - self._free) if stands_still else 1)

    def _start(self, number: int) -> None:
        """Let up to `number` more threads work, if there are calls for them."""
        with self._lock:
            number = min(number, len(self._waiting), self._free)
            self._free -= number
        for _ in range(number):
            self._threads.run(self._work)

    def _work(self) -> None:
        late = time.monotonic() + PATIENCE
        call = self._next_call()
        while call is not None:
            call.run()
            if self._waiting and time.monotonic() > max(late, self._added_at + PATIENCE):
                self._add()  # the event loop may have no time for it
            call = self._next_call(call)

    def _next_call(self, finished_call: ThreadCall | None = None) -> ThreadCall | None:
        """The call that a thread runs after the one that is done; None ends its turn."""
        with self._lock:
            if finished_call is not None and finished_call.goes_on:
                if not self._waiting or not self._free:
                    return None
                self._free -= 1  # its place is taken, and the next call needs another one
            elif finished_call is not None:
                self._leave(finished_call)
            if not self._waiting:
                self._free += 1
                return None
            self._taken += 1
            call = self._waiting.popleft()
            call.start_time = self._clock()
            return call

    def _leave(self, call: ThreadCall) -> None:
        call.is_over = True
        self._given_up.discard(call)


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
                loop.call_soon_threadsafe(self._run_letters)
            except RuntimeError:  # the loop is closed: nothing waits for it
                self._woken = False

    def _run_letters(self) -> None:
        self._woken = False  # first, so that a letter that arrives meanwhile wakes the loop again
        while self._letters:
            self._letters.popleft()()
