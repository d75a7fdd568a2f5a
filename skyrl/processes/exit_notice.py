"""The end of a process, told once to everyone who waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from skyrl.errors import ProcessError


class ExitNotice:
    """Whether a process has ended before its time, when that was noticed, and why. Any thread may ask or tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[object, Callable[[], None]] = {}
        self.error: ProcessError | None = None
        self.noticed = float("inf")

    def set(self, error: ProcessError) -> None:
        """Tells every listener; only the first cause counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error, self.noticed = error, time.monotonic()
            listeners = list(self._listeners.values())
        for tell in listeners:
            tell()

    def listen(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Has `tell` called when the process ends, at once if it has; returns what takes that back."""
        key = object()
        with self._lock:
            self._listeners[key] = tell
            is_set = self.error is not None
        if is_set:
            tell()

        def forget() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return forget
