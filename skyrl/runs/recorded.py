"""Runs that make a recording, and runs that train on one, which need no rollouts and no weight transfer."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from skyrl.errors import DataError
from skyrl.installation import __version__
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker
from skyrl.tracking.recording import FOLDER, Recording, SampledBatch
from skyrl.training.step_trace import Digests, weight_digests
from skyrl.training.time_sharing import TimeSharing
from skyrl.trajectory import TrajectoryGroup


class RecordedRun:
    """The folder of another run, with its recording. Raises `DataError` if there is none."""

    def __init__(self, folder: Path) -> None:
        self.recording = Recording(folder / FOLDER)
        self.about = self.recording.about()

    def total_steps(self, *, at_most: int | None = None) -> int:
        """Number of recorded steps, at most `at_most`. Raises `DataError` if a step from the first on is missing."""
        steps = self.recording.steps()
        if steps != list(range(1, len(steps) + 1)) or not steps:
            raise DataError(
                f"{self.recording.folder} holds {len(steps)} steps"
                + (f", the first of which is {steps[0]}" if steps else "")
                + ": a replay needs all steps from the first"
            )
        return len(steps) if at_most is None else min(len(steps), at_most)


class RecordedRollouts:
    """The batches of a recording, which replace sampled `Rollouts`."""

    def __init__(self, recording: Recording, prompts: int) -> None:
        """`prompts` is the number of groups that a batch must have."""
        self._recording, self._prompts = recording, prompts
        self._last = SampledBatch(groups=())

    async def next_batch(self, version: int) -> tuple[TrajectoryGroup, ...]:
        """The groups sampled by weights of this version. Raises `DataError`."""
        self._last = self._recording.sampled(version + 1)
        if len(self._last.groups) != self._prompts:
            raise DataError(
                f"step {version + 1} in {self._recording.folder} has {len(self._last.groups)} groups, and "
                f"trainer.train_batch_size is {self._prompts}: set it to what was recorded"
            )
        return self._last.groups

    def metrics(self) -> dict[str, float]:
        return dict(self._last.metrics)

    @property
    def epoch(self) -> int:
        return self._last.epoch

    def state(self) -> dict[str, Any]:
        """Empty: the version determines the next step."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Does nothing: a recording needs no position in the data."""

    def set_weights_version(self, version: int) -> None:
        """Does nothing: no group is sampled."""

    async def close(self) -> None:
        """Does nothing: nothing is running."""


class NoEngines:
    """Weight transfer of a run without engines."""

    is_behind = weights_discarded = False

    async def catch_up(self) -> None:
        """Does nothing: there are no engines."""

    async def publish(self, version: int) -> dict[str, float]:
        return {}


def weight_digests_of(learners: Mapping[str, LearnerGroup[LearningWorker]], turns: TimeSharing) -> dict[str, Digests]:
    """Functions that compute the digests of each learner's weights when it has its turn on shared devices."""

    async def digests(name: str, learner: LearnerGroup[LearningWorker]) -> dict[str, str]:
        await turns.for_scoring(name)
        return await learner.export_weights(weight_digests)

    return {name: partial(digests, name, learner) for name, learner in learners.items()}


def made_with() -> dict[str, str]:
    """Versions and settings, besides the configuration, that numbers may depend on."""
    named = {"skyrl": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in ("torch", "transformers", "peft", "deepspeed"):
        try:
            named[package] = version(package)
        except PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return named | {"threads": str(torch.get_num_threads()), "gpu": gpu}
