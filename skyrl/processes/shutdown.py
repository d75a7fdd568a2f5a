"""Stops a run on SIGTERM, SIGHUP, Ctrl-C or a deadline, whatever the run is doing.

    with ShutdownSignal(grace=30.0) as stopping:      # main thread
        ...                                     # raises `Stopped` here, or
        asyncio.run(...)                        # inside `with stopping.interruptible(): ...`

A separate thread receives the signals, so that a computation in native code does not delay the end: when the grace
period is over, or at the second signal, the process ends at once and keeps only what was saved before. The processes
that it started end with it (`orphans.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from types import FrameType
from typing import Any, Self

from skyrl.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Stopped
from skyrl.processes.signals import RESUMES_FROM_LAST_CHECKPOINT, STOPPED_BY, handled_signals, stop_command

_LONG = 3600.0
_WAKES_EVERY = 1.0
"""Longest wait, in seconds, in the grace period, which does not run while the process is stopped (SIGSTOP)."""
_LAST_WORDS_SECONDS = 1.0


class ShutdownSignal:
    """Request to stop the run: whether it was made, its reason, and the awaits that it may cancel. Use one at a time,
    in the main thread.

    In any other thread, it receives no signals, only its deadline.
    """

    def __init__(
        self,
        *,
        grace: float,
        stop_before: float | str | None = None,
        field: str = "trainer.faults.stop_before",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`grace` is in seconds. `stop_before` is a deadline as in `trainer.faults.stop_before`; the run is asked to
        stop the grace period before it. `field` is the path of that field in messages. `clock` gives the seconds by
        which the deadline, the grace period and the length of steps are measured.
        """
        self._grace, self._field, self.now = grace, field, clock
        self._deadline = float("inf") if stop_before is None else self.now() + seconds_until(stop_before) - grace
        self.reason = ""
        """Beginning of the final message; empty as long as no stop is requested."""
        self._exit_code = EXIT_REQUEUE
        self._in_loop = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ended = threading.Event()
        self._write: socket.socket | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._read, write = socket.socketpair()
        self._read.setblocking(False)
        write.setblocking(False)
        self._write = write
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle_signal) for number in handled_signals()}
            self._wakeup = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="skyrl-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                ends = self.requested and handler is stop_command
                signal.signal(number, signal.SIG_IGN if ends else handler)
        self._wake()
        self._thread.join()
        self._read.close()
        if self._write is not None:
            self._write.close()

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return bool(self.reason)

    @property
    def seconds_left(self) -> float:
        """Seconds until the run is asked to stop for its deadline."""
        return self._deadline - self.now()

    def request(self, reason: str, exit_code: int = EXIT_REQUEUE) -> None:
        """Ask the run to stop; only the first reason counts. Thread-safe."""
        if not self.reason:
            self._exit_code, self.reason = exit_code, reason
            self._wake()
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                    self._loop.call_soon_threadsafe(self._cancel)

    def request_before_deadline(self) -> None:
        """Ask the run to stop because too little time is left until the deadline."""
        self.request(f"Stopped before the deadline of {self._field}")

    def stopped(self, details: str) -> Stopped:
        """The exception that ends the run; `details` is the rest of its message and says what was saved."""
        return Stopped(f"{self.reason}. {details}", self._exit_code)

    @contextlib.contextmanager
    def in_loop(self) -> Iterator[None]:
        """While an event loop runs in the block, a request only interrupts code inside `interruptible`."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    @contextlib.contextmanager
    def at_any_point(self) -> Iterator[None]:
        """A signal raises `Stopped` in the block although an event loop runs; for work that blocks the loop."""
        before, self._in_loop = self._in_loop, False
        try:
            yield
        finally:
            self._in_loop = before

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Cancel the awaits in the block on a request to stop. Raises `Stopped`, also for requests before the block."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        task = self._task
        try:
            self.check()
            yield
        except asyncio.CancelledError:
            if not self.requested or task is None or task.uncancel() > 0:
                raise
            raise self.stopped(RESUMES_FROM_LAST_CHECKPOINT) from None
        finally:
            self._task = None
        self.check()

    async def in_time(self, call: Awaitable[object]) -> bool:
        """Await a call that need not complete once the run is to stop: it is then cancelled after a third of the grace
        period, so that there is time to save. Returns whether it completed.
        """
        task, until = asyncio.ensure_future(call), float("inf")
        try:
            while not task.done() and self.now() < until:
                await asyncio.wait([task], timeout=min(_WAKES_EVERY, self._grace / 3))
                if self.requested and until == float("inf"):
                    until = self.now() + self._grace / 3
            if task.done():
                await task
            return task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        """Raises `Stopped` if the run is to stop."""
        if self.requested:
            raise self.stopped(RESUMES_FROM_LAST_CHECKPOINT)

    def _wake(self) -> None:
        """Wake the watching thread."""
        with contextlib.suppress(OSError):
            if self._write is not None:
                self._write.send(b"\0")

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Python's signal handler. It raises at once if no loop runs, since there is no training to save then."""
        self._note(number)
        if not self._in_loop and not self._ended.is_set():
            self.check()

    def _note(self, number: int) -> None:
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE
        self.request(STOPPED_BY[signal.Signals(number)], code)

    def _watch(self) -> None:
        signals, ends_at, now = 0, float("inf"), self.now()
        waiting = select.poll()  # `select.select` takes no descriptor above 1023
        waiting.register(self._read, select.POLLIN)
        while not self._ended.is_set():
            wait = max(0.0, min(ends_at - now, _WAKES_EVERY) if self.requested else min(self.seconds_left, _LONG))
            ready = waiting.poll(wait * 1000)
            before, now = now, self.now()
            if (late := now - before - wait) > _WAKES_EVERY:  # the process was stopped, by a scheduler or a debugger
                ends_at += late
            for number in self._read.recv(64) if ready else b"":
                if number in self._before:
                    signals += not (signals and number == signal.SIGHUP)  # a closed terminal sends it more than once
                    self._note(number)
            if self._ended.is_set():
                return
            if not self.requested and self.seconds_left <= 0:
                self.request_before_deadline()
            if self.requested and ends_at == float("inf"):
                ends_at = now + self._grace
            if signals > 1:
                self._end_at_once("Stopped immediately by a second signal.")
            if now >= ends_at:
                self._end_at_once(f"Stopped: saving did not finish within {self._grace:g} s.")

    def _end_at_once(self, reason: str) -> None:
        """End the process, even if its output is no longer read or a thread that is stuck holds the stream."""
        words = threading.Thread(target=_write_reason, args=(reason,), daemon=True)
        words.start()
        words.join(_LAST_WORDS_SECONDS)
        os._exit(self._exit_code)


def _write_reason(reason: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{reason} {RESUMES_FROM_LAST_CHECKPOINT}\n".encode())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def seconds_until(moment: float | str) -> float:
    """Seconds of a duration, or from now to a point in time in ISO 8601, by the clock of this machine."""
    if not isinstance(moment, str):
        return moment
    return datetime.fromisoformat(moment).timestamp() - time.time()
