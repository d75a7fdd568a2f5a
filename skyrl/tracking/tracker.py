"""The tracker protocol: a tracker takes the metrics of each step; several can be combined into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs


class Tracker(Protocol):
    """Something that metrics are logged to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step, by name; step 0 holds the metrics from before training."""

    def close(self) -> None:
        """Flush: everything logged has been stored when this returns. Does nothing by default."""
        return  # with a body, no subclass has to define it


@attrs.frozen(kw_only=True)
class TrackedRun:
    """Facts about a run that a tracker may use."""

    project: str
    """Name under which runs are grouped."""

    name: str
    folder: Path
    """The run's own folder."""

    total_steps: int
    """Steps of the whole run."""

    first_step: int
    """Step that the session starts from; above 0 in a resumed run."""


class LastMetrics(Tracker):
    """Remembers the metrics of the last step."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
