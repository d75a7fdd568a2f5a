"""A time limit for chat templates, which may contain an endless loop."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from skyrl.errors import TemplateTimeoutError

CPU_SECONDS = 10.0
"""Seconds of processor time for one call. Published templates need milliseconds for a conversation."""

CPU_SECONDS_PER_CHAT = 0.01
"""Additional seconds for each further conversation that is rendered in the same call."""


_watched = threading.local()
"""`now`: whether this thread is in a block with a limit."""


class _Overdue(BaseException):
    """Raised in the thread that runs a template. Jinja catches `Exception`, and must not catch this."""


@contextmanager
def bounded(template: str, chats: int = 1) -> Iterator[None]:
    """Interrupts this thread when the block exceeds its limit of processor time.

    Python handles the interruption between two operations of the template: a loop or a recursion is ended, a single
    huge operation (`10 ** 10 ** 10`) is not. Within another such block, the limit is that of the outer block.

    Raises `TemplateTimeoutError`, which names the `template`.
    """
    if getattr(_watched, "now", False):
        yield
        return
    seconds = CPU_SECONDS + CPU_SECONDS_PER_CHAT * (chats - 1)
    watch = _Watch(threading.get_ident(), seconds)
    watch.start()
    try:
        try:
            _watched.now = True
            yield
        finally:
            _watched.now = False
            watch.end()
    except _Overdue:
        _watched.now = False  # it may have been raised before the block above said so
        raise TemplateTimeoutError(
            f"{template} used {seconds:g} s of processor time without finishing and was stopped: it loops for too "
            "long or forever; use another template"
        ) from None


class _Watch(threading.Thread):
    """Raises `_Overdue` in a thread that uses more than `seconds` of processor time from now on, unless `end` is called
    first.
    """

    def __init__(self, watched: int, seconds: float) -> None:
        super().__init__(name="skyrl-template-deadline", daemon=True)
        self._watched, self._seconds = watched, seconds
        self._clock = time.pthread_getcpuclockid(watched)
        self._limit = time.clock_gettime(self._clock) + seconds
        self._ended, self._lock, self._fired = threading.Event(), threading.Lock(), False

    def run(self) -> None:
        while not self._ended.wait(self._seconds / 4):
            with self._lock:
                if not self._ended.is_set() and time.clock_gettime(self._clock) > self._limit:
                    self._fired = True
                    exception = ctypes.py_object(_Overdue)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), exception)
                    return

    def end(self) -> None:
        """Stop watching. Called by the watched thread; nothing is raised in it afterwards."""
        with self._lock:
            self._ended.set()
        if self._fired:
            # An exception that has not been raised yet is raised where a loop turns. It is not cancelled: in CPython
            # 3.11 that leaves a request to look for exceptions which nobody answers, and the process stops for ever as
            # soon as it is traced, by a debugger or for coverage.
            for _ in range(3):
                pass
