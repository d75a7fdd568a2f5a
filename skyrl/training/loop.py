"""The course of a session: step after step, and what there is to do around each of them.

What happens inside a step is `trainer.py`'s business. Here is when to evaluate, refresh the reference, save, export and
stop, what to do about a number that is none, and what a checkpoint holds of the loop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from skyrl.config import TrainerConfig
from skyrl.errors import NonFiniteError, Stopped
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.tracking.timing import Clock
from skyrl.tracking.tracker import Tracker
from skyrl.training.describe import Metrics
from skyrl.training.evaluation import Evaluation
from skyrl.training.guards import FiniteNumbers, Guard
from skyrl.training.middleware import in_context, on_result
from skyrl.training.trainer import PPOTrainer
from skyrl.training.triggers import Trigger
from skyrl.trajectory import TrajectoryGroup


class Checkpoints(Protocol):
    """Where the models and the state of the loop are kept."""

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Keep both: they are copied when this returns, and may be written later. Raises what the save before failed
        with.
        """

    async def finish(self) -> None:
        """Return when all that was to be saved is. Raises `RunError` if it cannot be."""

    async def go_back(self) -> Mapping[str, Any] | None:
        """The models become those of the last checkpoint. The state in it; None where there is no checkpoint."""


class TrainingLoop:
    """One trainer's way from the step it is at to the last one."""

    def __init__(
        self,
        config: TrainerConfig,
        trainer: PPOTrainer,
        *,
        evaluation: Evaluation | None,
        tracker: Tracker,
        clock: Clock,
        total_steps: int,
        shutdown: ShutdownSignal,
        checkpoints: Checkpoints,
        export: Callable[[int], Awaitable[None]],
        refresh_reference: Callable[[], Awaitable[None]],
        on_samples: Callable[[int, Sequence[TrajectoryGroup]], None],
    ) -> None:
        """`export` writes the model of the step that it is given; `on_samples` sees every rollout with its step.

        `total_steps` counts batches. A `trainer` goes one course: who looks after it stands between it and its
        collaborators from here on.
        """
        self.trainer, self.tracker, self.clock, self.shutdown = trainer, tracker, clock, shutdown
        self.total_steps = total_steps
        self.samples_seen = self.tokens_seen = 0
        """Answers that were sampled for training since the beginning of the run, and their tokens."""
        self._evaluation, self._checkpoints = evaluation, checkpoints
        self._export, self._refresh_reference, self._on_samples = export, refresh_reference, on_samples
        self._evaluates_first = config.eval_before_train
        self._guard = Guard(config.faults)
        self._saved = 0
        self._before: dict[str, Any] | None = None  # where the step that is going on began
        self._unrecorded: Metrics | None = None  # of a step whose evaluation is not over
        self._longest_step = 0.0
        self._triggers = {
            "evaluate": Trigger(config.eval_interval),
            "save": Trigger(config.ckpt_interval),
            "export": Trigger(config.hf_save_interval),
            "refresh": Trigger("1 epoch" if config.update_ref_every_epoch else -1),
        }
        self._look_after(trainer)

    def _look_after(self, trainer: PPOTrainer) -> None:
        """Until something is learnt, a step can be interrupted, and a number that is none ends it."""
        FiniteNumbers().watch(trainer)
        interruptible = self.shutdown.interruptible
        trainer.rollouts = on_result(in_context(trainer.rollouts, next_batch=interruptible), next_batch=self._arrived)
        trainer.policy = in_context(trainer.policy, score=interruptible)
        trainer.reference = trainer.reference and in_context(trainer.reference, score=interruptible)
        trainer.critic = trainer.critic and in_context(trainer.critic, score=interruptible)

    async def _arrived(self, groups: Sequence[TrajectoryGroup]) -> None:
        answers = [trajectory for group in groups for trajectory in group.trajectories]
        self.samples_seen += len(answers)
        self.tokens_seen += sum(len(answer.response_ids) for answer in answers)
        self._on_samples(self.trainer.version + 1, groups)

    async def run(self) -> None:
        """From the current version to the last step. Raises `Stopped` when told to stop, with what was learnt saved."""
        try:
            await self._begin()
            while self.trainer.version < self.total_steps:
                try:
                    metrics = await self.step()
                    await self._conclude(metrics | self._timings(metrics), evaluate=self._is_due("evaluate"))
                except NonFiniteError as error:
                    await self._go_back(error)
            await self._checkpoints.finish()
        except Stopped as stop:
            raise await self._saved_before_the_end(stop) from None

    async def _begin(self) -> None:
        """Engines with the current weights; what was left undone by an earlier session."""
        with self.shutdown.interruptible():
            metrics = await self.trainer.weights.publish(self.trainer.version)
            if self.trainer.version == 0:
                metrics |= await self._evaluate() if self._evaluates_first else {}
                self.tracker.log(0, metrics | self.clock.take())
            self.clock.take()
        if self._unrecorded is not None:
            await self._conclude(dict(self._unrecorded), evaluate=True)

    async def step(self) -> Metrics:
        """One step of the trainer, left out where it may be; the version counts it. Raises `NonFiniteError`."""
        if self.shutdown.seconds_left < self._longest_step:
            self.shutdown.request("Stopped before the deadline of trainer.faults.stop_before")
        self._before = self._position()
        began = time.monotonic()
        with self.clock.measure("step"):
            metrics = await self._step_or_leave_out(self._before)
            if self._triggers["refresh"].due(self.trainer.version + 1, self.trainer.rollouts.epoch, last=False):
                with self.clock.measure("update_ref_with_policy"):
                    await self._refresh_reference()
        self._longest_step = max(self._longest_step, time.monotonic() - began)
        self.trainer.version, self._before = self.trainer.version + 1, None
        return metrics | {
            "trainer/epoch": self.trainer.rollouts.epoch,
            "trainer/global_step": self.trainer.version,
            "trainer/samples_seen": self.samples_seen,
            "trainer/tokens_seen": self.tokens_seen,
        }

    async def _step_or_leave_out(self, before: Mapping[str, Any]) -> Metrics:
        try:
            metrics = await self.trainer.step()
        except NonFiniteError as error:
            self._guard.leave_out(error)
            self.trainer.shaping.load_state(before["rewards"])
            return await self.trainer.weights.publish(self.trainer.version + 1) | {"trainer/skipped_steps": 1}
        self._guard.went_well()
        return metrics

    async def _go_back(self, error: NonFiniteError) -> None:
        """To the last checkpoint, with the prompts after this batch. Raises `error` where the run has to end."""
        self._guard.roll_back(error)
        state = await self._checkpoints.go_back()
        if state is None:
            raise NonFiniteError(f"{error} (there is no checkpoint to go back to)") from error
        self.load_state({**state, "unrecorded": None, "rollouts": self.trainer.rollouts.state()})
        self._guard.say(f"going back to step {self.trainer.version}, and on with other prompts: {error}")
        await self.trainer.weights.publish(self.trainer.version)

    async def _conclude(self, metrics: Metrics, *, evaluate: bool) -> None:
        """What follows a step: evaluation, its record, export, checkpoint; a checkpoint has its record and export."""
        if evaluate:
            self._unrecorded = metrics
            with self.shutdown.interruptible():
                metrics = metrics | await self._evaluate()
        self._unrecorded = None
        self.tracker.log(self.trainer.version, metrics | self.clock.take())
        save = self._is_due("save")
        if self._is_due("export"):
            await self._export(self.trainer.version)
        if save and self.trainer.version > self._saved:
            await self._keep()

    async def _keep(self) -> None:
        with self.clock.measure("save_checkpoints"):
            await self._checkpoints.save(self.trainer.version, self.state())
        self._saved = self.trainer.version

    async def _saved_before_the_end(self, stop: Stopped) -> Stopped:
        """Keeps the last step, of which nothing was lost, where checkpoints are wanted; nothing is said to be saved
        before it is.
        """
        version = self.trainer.version
        if version > self._saved and self._triggers["save"].ever:
            await self._keep()
        await self._checkpoints.finish()
        if version == self._saved > 0:
            return self.shutdown.stopped(f"Step {version} is saved: the same command goes on after it.")
        return stop

    async def _evaluate(self) -> Metrics:
        if self._evaluation is None:
            return {}
        with self.clock.measure("eval"):
            return await self._evaluation.run(self.trainer.version)

    def _is_due(self, what: str) -> bool:
        version = self.trainer.version
        return self._triggers[what].due(version, self.trainer.rollouts.epoch, last=version == self.total_steps)

    def _timings(self, metrics: Metrics) -> Metrics:
        timings = self.clock.take()
        self.clock.total += timings["timing/step"]
        timings |= {"timing/all_steps": self.clock.total}
        return timings | {"trainer/tokens_per_second": metrics.get("generate/num_tokens", 0) / timings["timing/step"]}

    def _position(self) -> dict[str, Any]:
        return {
            "samples_seen": self.samples_seen,
            "tokens_seen": self.tokens_seen,
            "rollouts": self.trainer.rollouts.state(),
            "rewards": self.trainer.shaping.state(),
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of the loop: as it was after the last whole step."""
        return {
            "version": self.trainer.version,
            "seconds": self.clock.total,
            **(self._before or self._position()),
            "triggers": {what: trigger.state() for what, trigger in self._triggers.items()},
            "unrecorded": self._unrecorded,  # metrics of the last step, where its evaluation is still to come
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the step that `state` was taken at."""
        self.trainer.version = self._saved = int(state["version"])
        self.samples_seen, self.tokens_seen = int(state["samples_seen"]), int(state["tokens_seen"])
        self.clock.total = float(state["seconds"])
        self.trainer.rollouts.load_state(state["rollouts"])
        self.trainer.shaping.load_state(state["rewards"])
        for what, trigger in self._triggers.items():
            trigger.load_state(state.get("triggers", {}).get(what, {}))
        self._unrecorded = state.get("unrecorded")
        self._before = None
