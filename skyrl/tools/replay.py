"""Replays a recorded step from its stored trajectories and the preceding checkpoint, and compares the results.

The learners start from the last checkpoint before the step and go through every recorded step up to it. No engine is
started and nothing is sampled. Everything that each step computes is compared with the recording.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from attrs import field, frozen

from skyrl.checkpoint.store import CheckpointStore
from skyrl.config import SkyRLTrainConfig
from skyrl.config.loading.kinds import samples_rollouts
from skyrl.config.loading.stored_code import named_code
from skyrl.errors import UserError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs.recorded import made_with
from skyrl.runs.stored_runs import checkpoints_of, stored_run
from skyrl.tools.comparing import Difference, differences_of_computing
from skyrl.tracking.recording import Computed, SampledBatch
from skyrl.tracking.tracker import Trackers
from skyrl.training.step_trace import Sink
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import evolve_at


@frozen(kw_only=True)
class Replayed:
    """Result of replaying one step."""

    computed: Computed
    differences: tuple[Difference, ...]
    """Differences in the order of the step's stages; empty if every bit is the same."""


@frozen
class _ComputedSink:
    """A `Sink` that keeps its data in memory."""

    computed: list[Computed] = field(factory=list)

    def write_sampled(self, step: int, sampled: SampledBatch) -> None:
        """Does nothing: the samples are already recorded."""

    def write_computed(self, computed: Computed) -> None:
        self.computed.append(computed)


class Replay:
    """One run's recording, and everything needed to run its steps again."""

    def __init__(self, folder: Path, *, checkpoints: Path | None = None, import_stored: bool = False) -> None:
        """`folder` is the run's; `checkpoints` is their folder, if not the one in the run's configuration.

        Raises `DataError` if there is no recording, `ResumeError` if there is no configuration, and `UserError` for a
        kind of run that records nothing or, without `import_stored`, for a configuration that names code that a replay
        would run.
        """
        run = stored_run(folder)
        if not samples_rollouts(run):
            raise UserError(
                f"{folder} is a run of kind = {run.kind}, which samples nothing and records no steps. Instead, train "
                "it twice in different folders with deterministic = true, and compare the metrics with skyrl bisect"
            )
        # Samples come from the recording: the code of environments, filters and engines does not run.
        for path, value, _ in () if import_stored else named_code(run):
            if path.startswith(("trainer.algorithm.", "trainer.placement.")):
                raise UserError(
                    f"{folder} names code that a replay would run: {path} = {value!r}. If you trust it, pass --trust"
                )
        for path, setting in {
            "trainer.rollouts_from": str(folder),
            "trainer.recording": "off",
            "trainer.eval_before_train": False,
            "trainer.eval_interval": -1,
        }.items():
            run = evolve_at(run, path, setting)
        self._store = CheckpointStore(checkpoints or checkpoints_of(str(folder)))
        self._experiment = _Repetition(run)
        recorded = self._experiment.recorded
        assert recorded is not None
        self.recording = recorded.recording
        self.made_with: dict[str, str] = dict(recorded.about["made_with"])

    def start_for(self, step: int) -> int:
        """Step of the checkpoint from which `step` is reached: the last one before it, or 0 for the initial model."""
        return max((saved for saved in self._store.steps() if saved < step), default=0)

    def other_versions(self) -> Iterator[str]:
        """Differences between current and recorded software versions, which may change the last bits."""
        for name, current in made_with().items():
            recorded = self.made_with.get(name)
            if recorded != current:
                yield f"{name} {recorded or 'absent'} then, {current} now"

    def run(self, steps: range) -> Iterator[Replayed]:
        """Run these steps in order, starting from the last checkpoint before the first of them.

        The steps between that checkpoint and the first one are run and yielded, too. Raises `DataError` if one of them
        is not recorded.
        """
        start = self.start_for(steps.start)
        for step in range(start + 1, steps.stop):
            self.recording.sampled(step)  # before models are loaded
        checkpoint = self._store.load(start) if start else None
        with self._experiment.resources:
            loop, kept = self._experiment.get_loop(Trackers([])), self._experiment.kept
            with asyncio.Runner() as runner:
                if checkpoint is not None:
                    runner.run(self._experiment.saving.restore(checkpoint))
                    loop.load_state(dict(checkpoint.state["trainer"]))
                while loop.trainer.version < steps.stop - 1:
                    runner.run(loop.step())
                    computed = kept.computed.pop()
                    before = self.recording.computed(computed.step)
                    groups = self.recording.sampled(computed.step).groups
                    differences = differences_of_computing(before, computed, groups)
                    yield Replayed(computed=computed, differences=tuple(differences))


class _Repetition(BasePPOExp):
    """The recorded run with its original number of total steps, on which decaying schedules depend."""

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        super().__init__(cfg)
        self.kept = _ComputedSink()

    @cached_property
    def total_steps(self) -> int:
        assert self.recorded is not None
        return int(self.recorded.about["total_steps"])

    def get_sinks(self) -> list[Sink]:
        return [self.kept]

    def _record_samples(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Does nothing: the run's folder already has its samples."""
