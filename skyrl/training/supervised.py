"""The loop of supervised training: a batch, an optimizer step; around it evaluation, checkpoints, exports, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SupervisedConfig
from skyrl.data.cursor import PromptCursor
from skyrl.errors import ResumeError, Stopped
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.tracking.timing import Clock
from skyrl.tracking.tracker import Tracker
from skyrl.training.supervised_evaluation import SupervisedEvaluation
from skyrl.training.triggers import Trigger

Metrics = dict[str, float]


class Learner(Protocol):
    """The model."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L), of the selected tokens."""

    async def update(self, batch: TrainingBatch) -> Metrics:
        """One optimizer step."""


class SupervisedTrainer:
    """Passes over rows. It knows neither what they are nor where the model lives."""

    def __init__(
        self,
        run: SupervisedConfig,
        *,
        cursor: PromptCursor[Any],
        collate: Callable[[Sequence[Any]], TrainingBatch],
        learner: Learner,
        evaluation: SupervisedEvaluation | None,
        tracker: Tracker,
        clock: Clock,
        total_steps: int,
        shutdown: ShutdownSignal,
        save: Callable[[int], Awaitable[None]],
        export: Callable[[int], Awaitable[None]],
    ) -> None:
        """`save` and `export` write a checkpoint and a model of the step they are given."""
        self.cursor, self.collate, self.learner = cursor, collate, learner
        self.evaluation, self.tracker, self.clock = evaluation, tracker, clock
        self.total_steps, self.shutdown = total_steps, shutdown
        self.version = 0
        """Optimizer steps that the weights have behind them."""
        self._eval_before = run.eval_before_train
        self._optimizer, self._may_change = run.optimizer_config, run.resume_with_changes
        self._save, self._export = save, export
        self._saved, self._longest_step = 0, 0.0
        self._triggers = {
            "evaluate": Trigger(run.eval_interval),
            "save": Trigger(run.ckpt_interval),
            "export": Trigger(run.hf_save_interval),
        }

    async def step(self) -> Metrics:
        """One batch and one optimizer step."""
        batch = self.collate(self.cursor.take())
        learned = await self.learner.update(batch)
        renamed = {name.removeprefix("policy_").removeprefix("critic_"): value for name, value in learned.items()}
        return {
            **{f"train/{name}": value for name, value in renamed.items()},
            "train/tokens": float(batch.lengths.sum()),
            "train/learned_tokens": float(batch.loss_mask.sum()),
        }

    async def run(self) -> None:
        """From the current step to the last. Raises `Stopped` when told to stop, with what was learnt saved."""
        try:
            with self.shutdown.interruptible():
                if self.version == 0:
                    self.tracker.log(0, (await self._evaluate() if self._eval_before else {}) | self.clock.take())
            while self.version < self.total_steps:
                metrics = await self._take_step()
                await self._conclude(metrics)
                self.shutdown.check()
        except Stopped as stop:
            raise await self._saved_before_the_end(stop) from None

    async def _take_step(self) -> Metrics:
        if self.shutdown.seconds_left < self._longest_step:
            self.shutdown.request("Stopped before the deadline of faults.stop_before")
            self.shutdown.check()
        began, self._epoch = time.monotonic(), self.cursor.epoch
        with self.clock.measure("step"):
            metrics = await self.step()
        self._longest_step = max(self._longest_step, time.monotonic() - began)
        self.version += 1
        timings = self.clock.take()
        speed = metrics["train/tokens"] / timings["timing/step"]
        return (
            metrics
            | timings
            | {
                "trainer/tokens_per_second": speed,
                "trainer/epoch": float(self._epoch),
                "trainer/global_step": float(self.version),
            }
        )

    async def _conclude(self, metrics: Metrics) -> None:
        """What follows a step: evaluation, its record, export, checkpoint, which has its record."""
        due = {
            what: trigger.due(self.version, self.cursor.epoch, last=self.version == self.total_steps)
            for what, trigger in self._triggers.items()
        }
        if due["evaluate"]:
            metrics = metrics | await self._evaluate()
        self.tracker.log(self.version, metrics | self.clock.take())
        if due["export"]:
            await self._export(self.version)
        if due["save"] and self.version > self._saved:
            await self._keep()

    async def _keep(self) -> None:
        with self.clock.measure("save_checkpoints"):
            await self._save(self.version)
        self._saved = self.version

    async def _saved_before_the_end(self, stop: Stopped) -> Stopped:
        if self.version > self._saved and self._triggers["save"].ever:
            await self._keep()
        if self.version == self._saved > 0:
            return self.shutdown.stopped(f"Step {self.version} is saved: the same command goes on after it.")
        return stop

    async def _evaluate(self) -> Metrics:
        if self.evaluation is None:
            return {}
        with self.clock.measure("eval"):
            return await self.evaluation.run(self.learner)

    def _refuse_another_length(self, before: int) -> None:
        """A schedule that ends with the run has had other rates than one that ends elsewhere."""
        optimizer = self._optimizer
        ends = optimizer.scheduler not in ("constant", "constant_with_warmup") or optimizer.warmup_steps_proportion
        if before != self.total_steps and ends and not self._may_change:
            raise ResumeError(
                f"the run had {before} steps when the checkpoint was saved, and has {self.total_steps}: the learning "
                f"rate ({optimizer.scheduler}) of the steps taken was another one. Keep num_steps, num_epochs and "
                "max_training_samples, or set resume_with_changes = true to continue with the rates of the new length"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of the loop."""
        return {
            "version": self.version,
            "total_steps": self.total_steps,
            "rows": self.cursor.state(),
            "triggers": {what: trigger.state() for what, trigger in self._triggers.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the step that `state` was taken at.

        Raises `ResumeError` where the run has another length, and with it another learning rate at the steps that were
        taken, unless changes are allowed.
        """
        self._refuse_another_length(int(state.get("total_steps", self.total_steps)))
        self.version = self._saved = int(state["version"])
        self.cursor.load_state(state["rows"])
        for what, trigger in self._triggers.items():
            trigger.load_state(state.get("triggers", {}).get(what, {}))
