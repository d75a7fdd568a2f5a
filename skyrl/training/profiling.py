"""Profiles of chosen steps: each rank of a learner traces its updates into a folder for that step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

from skyrl.batch import TrainingBatch
from skyrl.learners.workers.learning_worker import Objective
from skyrl.trajectory import TrajectoryGroup


class Profiled(Protocol):
    """A model whose ranks can trace their updates."""

    async def profile(self, folder: Path | None) -> None:
        """Make every rank trace its updates into `folder` from now on; None stops tracing."""


class ProfiledSteps:
    """Layers around updates that trace those of some steps into `folder/step_<n>`."""

    def __init__(self, steps: Collection[int], folder: Path) -> None:
        self._steps, self._folder, self._step = frozenset(steps), folder, 0

    def sampled(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Listener for `Rollouts.next_batch`: the step after `version` has begun."""
        self.begins(version + 1)

    def begins(self, step: int) -> None:
        """Treat updates from now on as part of `step`."""
        self._step = step

    def around(self, model: Profiled) -> Callable[[TrainingBatch, Objective], AbstractAsyncContextManager[None]]:
        """The layer around the first call of a model's update."""
        traced: set[int] = set()

        @asynccontextmanager
        async def layer(batch: TrainingBatch, objective: Objective) -> AsyncIterator[None]:
            if self._step in self._steps and self._step not in traced:
                traced.add(self._step)
                await model.profile(self._folder / f"step_{self._step}")
            elif self._step not in self._steps and traced:
                traced.clear()
                await model.profile(None)
            yield

        return layer
