"""Step numbers for the lines in the logs of other processes."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.processes.handles import Processes


class StepsInLogs:
    """A `Tracker` that informs the processes of each step that starts."""

    def __init__(self, processes: Processes, done: int) -> None:
        """`done` is the number of steps that have been recorded before."""
        self._processes = processes
        processes.step = done + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._processes.step = step + 1

    def close(self) -> None:
        """Does nothing: no resource is held."""
