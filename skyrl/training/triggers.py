"""Triggers for saving, exporting and evaluating."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from skyrl.config.foundation.intervals import Interval, read_interval


class Trigger:
    """Due when its interval in steps, epochs or seconds has passed, each counted separately (AReaL's rule), and at the
    last step. Seconds count the time that the run has been running, over all sessions.
    """

    def __init__(self, interval: Interval, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = read_interval(interval), now
        self._epochs = 0
        self._since = now()

    def due(self, step: int, epochs: int, *, last: bool) -> bool:
        """Whether the trigger is due after `step`, with `epochs` complete; `last` marks the run's last step. Call it
        once after each step.
        """
        every = self._every
        by_step = every.steps is not None and step % every.steps == 0
        by_epoch = every.epochs is not None and epochs // every.epochs > self._epochs // every.epochs
        by_time = every.seconds is not None and self._now() - self._since >= every.seconds
        self._epochs = epochs
        if by_time:
            self._since = self._now()
        return by_step or by_epoch or by_time or (last and every.ever)

    @property
    def ever(self) -> bool:
        """Whether the trigger can ever be due."""
        return self._every.ever

    def state(self) -> dict[str, Any]:
        """State of the trigger, as a checkpoint stores it."""
        seconds = {} if self._every.seconds is None else {"seconds": self._now() - self._since}
        return {"epochs": self._epochs, **seconds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, even if the interval has changed since."""
        self._epochs = int(state.get("epochs", 0))
        self._since = self._now() - float(state.get("seconds", 0.0))
