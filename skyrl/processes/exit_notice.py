"""Notice of the end of a process, delivered once to every listener."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from skyrl.errors import ProcessError


class ExitNotice:
    """Records whether a process has ended early, when that was noticed, and why. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[object, Callable[[], None]] = {}
        self.error: ProcessError | None = None
        self.noticed = float("inf")

    def set(self, error: ProcessError) -> None:
        """Notify every listener; only the first cause counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error, self.noticed = error, time.monotonic()
            listeners = list(self._listeners.values())
        for tell in listeners:
            tell()

    def listen(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Call `tell` when the process ends, or at once if it has ended; returns a function that stops listening."""
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
