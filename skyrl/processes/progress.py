"""Progress of a run: what it waits for, and how long nothing has finished, which distinguishes a hang from work.
`WaitReporter` says what a long wait is for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from attrs import frozen

_LATE = 1.0
"""Seconds by which a thread may wake too late without its process having been stopped."""

AFTER = 10.0
"""Seconds after which `WaitReporter` reports a wait."""

_SHOWN = 4
"""Number of waits that one line names."""

_WHOLE = "step"
"""A wait that encloses others, which are more specific."""


@frozen
class Wait:
    """One open wait."""

    number: int
    """Number among all waits of the run."""

    target: str
    seconds: float
    """Seconds since the wait began."""


@frozen
class Span:
    """One wait that has ended, in seconds of the clock of `Progress`."""

    target: str
    began: float
    ended: float


class Progress:
    """Open waits by name. Any thread may begin and end one; each beginning and end is progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._numbers, self._clock = itertools.count(), clock
        self._open: dict[int, tuple[str, float]] = {}
        self._last = clock()
        self.on_end: Callable[[Span], None] = lambda span: None
        """Called with each wait that has ended, in the thread that waited."""
        self.warning = ""
        """The last warning for users who watch the run."""
        self.details: Callable[[], str] = str
        """Details about the waits, such as the number of unfinished samples; empty if there are none."""

    @contextlib.contextmanager
    def waiting_for(self, target: str) -> Iterator[None]:
        """Record that the run waits for `target` while the block runs."""
        number = next(self._numbers)
        self.note()
        began = self._last
        self._open[number] = target, began
        try:
            yield
        finally:
            self._open.pop(number, None)
            self.note()
            self.on_end(Span(target, began, self._last))

    def note(self) -> None:
        """Record progress: something has finished."""
        self._last = self._clock()

    def now(self) -> float:
        """Seconds by the clock of this object."""
        return self._clock()

    @property
    def seconds_without(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._last

    def waits(self) -> list[str]:
        """Open waits in the order in which they began, as text: see `wait_texts`."""
        return wait_texts(self.open_waits())

    def open_waits(self) -> list[Wait]:
        """The open waits in the order in which they began."""
        now = self._clock()
        return [Wait(number, target, now - since) for number, (target, since) in list(self._open.items())]


def wait_texts(waits: Iterable[Wait]) -> list[str]:
    """Each thing that is waited for once, with the longest wait: `generate (for 31 s)`, and processes in one call
    together: `policy-0 and 7 others in PolicyWorker.update (8 times, for up to 31 s)`.
    """
    grouped: dict[str, list[Wait]] = {}
    for wait in waits:
        process, _, call = wait.target.partition(" in ")
        grouped.setdefault(call or process, []).append(wait)
    return [_wait_text(alike) for alike in grouped.values()]


def _wait_text(alike: list[Wait]) -> str:
    longest = max(wait.seconds for wait in alike)
    if len(alike) == 1:
        return f"{alike[0].target} (for {longest:.0f} s)"
    process, _, call = alike[0].target.partition(" in ")
    others = len({wait.target for wait in alike}) - 1
    who = f"{process} and {others} other{'s' if others > 1 else ''}" if others else process
    return f"{who}{call and ' in '}{call} ({len(alike)} times, for up to {longest:.0f} s)"


class Watchdog:
    """A thread that reports once when there is no progress for longer than `seconds`, and again after new progress.

    Time in which the process itself was stopped (SIGSTOP, a suspended job) does not count.
    """

    def __init__(
        self,
        progress: Progress,
        seconds: float,
        *,
        stacks: Path,
        dump_others: Callable[[], Sequence[Path]],
        on_stall: Callable[[str], None],
        field: str = "trainer.faults.stall_timeout_seconds",
    ) -> None:
        """The stacks of this process go to the file `stacks`; `dump_others` writes those of other processes and returns
        their paths. `on_stall` is called with the whole diagnosis in the watchdog's thread. `field` is the path of
        `seconds` in the configuration.
        """
        self._progress, self._seconds, self._stacks = progress, seconds, stacks
        self._dump_others, self._on_stall, self._field = dump_others, on_stall, field
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="skyrl-watchdog", daemon=True)
        progress.note()
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        is_reported, pause, seen = False, min(5.0, self._seconds / 4), self._progress.now()
        while not self._ended.wait(pause):
            stalled = self._progress.seconds_without > self._seconds
            before, seen = seen, self._progress.now()
            if seen - before > 2 * pause + _LATE:  # this process was stopped, by a scheduler or a debugger
                self._progress.note()
                continue
            if stalled and not is_reported:
                self._on_stall(self._diagnosis())
            is_reported = stalled

    def _diagnosis(self) -> str:
        silent, waits = self._progress.seconds_without, self._progress.waits()
        with self._stacks.open("a", encoding="utf-8") as file:
            file.write(f"\nno progress for {silent:.0f} s, at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        paths = ", ".join(str(path) for path in (self._stacks, *self._dump_others()))
        return (
            f"no progress for {silent:.0f} s ({self._field} = {self._seconds:g}); "
            f"the run is waiting for: {'; '.join(waits) or 'nothing that it knows of'}; "
            f"stack traces of all threads are in: {paths}"
        )


class WaitReporter:
    """Reports each wait once, after `after` seconds, and after at least twice the longest earlier wait of its kind: a
    run whose steps take a minute each does not report every step.

        waiting for: generate (for 10 s); 3 of 128 samples, 3 in their environments, the oldest for 9 s
    """

    def __init__(self, progress: Progress, report: Callable[[str], None], *, after: float = AFTER) -> None:
        """`report` is called with one line, in the watching thread."""
        self._progress, self._report, self._after = progress, report, after
        self._longest: dict[str, float] = {}
        self._seen: dict[int, Wait] = {}  # open at the last look
        self._reported: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="skyrl-waits", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Report the open waits, if one of them has to be reported now."""
        waits = [wait for wait in self._progress.open_waits() if wait.target != _WHOLE]
        opened = {wait.number: wait for wait in waits}
        for number in self._seen.keys() - opened.keys():
            ended = self._seen[number]
            self._longest[ended.target] = max(ended.seconds, self._longest.get(ended.target, 0.0))
            self._reported.discard(number)
        self._seen = opened
        new = [wait for wait in waits if wait.number not in self._reported]
        if not any(wait.seconds >= self._patience(wait.target) for wait in new):
            return
        self._reported |= {wait.number for wait in waits}
        texts, details = wait_texts(waits), self._progress.details()
        more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        self._report("waiting for: " + "; ".join([*texts[:_SHOWN], *more, *([details] if details else [])]))

    def _patience(self, target: str) -> float:
        return max(self._after, 2 * self._longest.get(target, 0.0))

    def _watch(self) -> None:
        while not self._ended.wait(self._after / 10):
            self.look()
