"""The training loop: repeats the steps of a trainer, and does the work around them.

A step itself is defined by the trainer (`trainer.py`, `supervised.py`). The loop decides when to evaluate, refresh the
reference, save, export and stop, handles non-finite values, and defines the loop's state in a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from attrs import field, frozen

from skyrl.config.foundation.intervals import Interval, read_interval
from skyrl.config.settings.run_basics import RunBasics
from skyrl.errors import NonFiniteError, Stopped
from skyrl.processes.garbage import Collections, lasting_objects
from skyrl.processes.machine_facts import resident_bytes
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.tracking.timing import Clock
from skyrl.tracking.tracker import Tracker
from skyrl.training.alarms import Alarms, RaisedAlarm
from skyrl.training.callbacks import Callbacks
from skyrl.training.describe import Metrics


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


class Position(Protocol):
    """The position of training in its data, and any other state besides the weights that changes from step to step."""

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""

    def metrics(self) -> Metrics:
        """Progress of training, under the names that it is logged with, `trainer/epoch` included."""

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""

    def data(self) -> dict[str, Any]:
        """The part of `state` that says which data come next."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises `ResumeError` if the state belongs to other data."""


class Trainer(Protocol):
    """The interface of a trainer, as the loop uses it."""

    version: int
    """Number of training steps, skipped ones included; the loop counts them."""

    @property
    def token_metric(self) -> str:
        """Metric that counts the tokens of a step."""

    @property
    def position(self) -> Position: ...

    async def begin(self) -> Metrics:
        """Prepare for the steps after `version`: at the start of a session, and after a return to a checkpoint."""

    async def step(self) -> Metrics:
        """Train on one batch. Raises `NonFiniteError`, and `Stopped` if nothing was learned."""


class StepGuard(Protocol):
    """Decides how to continue after a non-finite value."""

    def step_succeeded(self) -> None:
        """Record a step without a non-finite value."""

    async def skip_step(self, error: NonFiniteError, before: Mapping[str, Any]) -> Metrics:
        """Skip the step that raised; `before` is the state of the position at its beginning. Raises `NonFiniteError`
        if it may not be skipped.
        """

    def roll_back(self, error: NonFiniteError) -> None:
        """The run is about to return to its last checkpoint. Raises `NonFiniteError` if it must not."""

    def rolled_back(self, error: NonFiniteError) -> None:
        """The run has returned."""


class Checkpoints(Protocol):
    """Storage of the models and of the loop's state."""

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save both: they have been copied when this returns, and may be written later. Raises the error of the
        previous save if that failed.
        """

    async def finish(self) -> None:
        """Wait until everything is saved. Raises `RunError` if that fails."""

    async def go_back(self) -> Mapping[str, Any] | None:
        """Restore the models of the last checkpoint and return its state; None if there is no checkpoint."""


@frozen(kw_only=True)
class Hooks:
    """Actions around the steps that depend on the kind of training."""

    evaluate: Callable[[int], Awaitable[Metrics]] | None
    """Evaluates the weights of a version on held-out data."""

    export: Callable[[int], Awaitable[None]]
    """Writes the model of a step."""

    refresh_reference: Callable[[], Awaitable[None]] | None = None
    """Copies the policy to the reference. None: there is no reference, or it never changes."""

    after_step: Callable[[int], Awaitable[None]] | None = None
    """Called after each step, with its number, before a checkpoint is saved. None: nothing is."""

    guard: StepGuard | None = None
    """Decides what follows a non-finite value. None: it ends the run."""

    alarms: Alarms = field(factory=lambda: Alarms(()))
    """Alarms of the run: conditions on metrics."""

    report_alarm: Callable[[RaisedAlarm], None] = lambda raised: None
    """Reports a raised alarm."""

    callbacks: Callbacks = field(factory=lambda: Callbacks({}))
    """The user's callbacks, which hear of every event."""


class TrainingLoop:
    """Runs a trainer from its current step to the last, with evaluation, checkpoints and export."""

    def __init__(
        self,
        config: RunBasics,
        trainer: Trainer,
        hooks: Hooks,
        *,
        total_steps: int,
        tracker: Tracker,
        clock: Clock,
        shutdown: ShutdownSignal,
        checkpoints: Checkpoints,
    ) -> None:
        """`total_steps` counts batches, including those of earlier sessions."""
        self.trainer, self.total_steps = trainer, total_steps
        self.tracker, self.clock, self.shutdown = tracker, clock, shutdown
        self._hooks, self._checkpoints, self._callbacks = hooks, checkpoints, hooks.callbacks
        self._callbacks.watch(lambda: (trainer.version, trainer.position.epoch))
        self._evaluates_first = config.eval_before_train
        self._saved_version = 0
        self._position_before_step: dict[str, Any] | None = None
        self._metrics_awaiting_eval: Metrics | None = None  # metrics of a step whose evaluation has not finished
        self._longest_step = 0.0
        self._garbage = Collections()
        self._triggers = {
            "evaluate": Trigger(config.eval_interval),
            "save": Trigger(config.ckpt_interval),
            "export": Trigger(config.hf_save_interval),
            "refresh": Trigger(config.ref_update_interval),
        }

    async def run(self) -> None:
        """Run from the current version to the last step. Raises `Stopped` on a request to stop, with everything learned
        saved.
        """
        with lasting_objects():
            try:
                self._callbacks.tell("on_train_begin")
                await self._begin()
                while self.trainer.version < self.total_steps:
                    if self._hooks.alarms.stopped_by or self._callbacks.stopped_by:
                        break
                    try:
                        metrics = await self.step()
                        timings = self.clock.take()
                        seconds = timings["timing/step"]
                        self.clock.total += seconds
                        metrics |= timings | {
                            "timing/all_steps": self.clock.total,
                            "trainer/tokens_per_second": metrics.get(self.trainer.token_metric, 0) / seconds,
                            "memory/process_bytes": float(resident_bytes()),
                        }
                        is_due = self._is_due("evaluate")
                        self._callbacks.tell("on_step_end", metrics)
                        await self._conclude(metrics, evaluate=is_due or self._callbacks.control.should_evaluate)
                    except NonFiniteError as error:
                        await self._go_back(error)
                    self._garbage.between_steps()
                await self._checkpoints.finish()
            except Stopped as stop:
                stopped = await self._saved_before_the_end(stop)
                self._callbacks.tell("on_train_end")
                raise stopped from None
            self._callbacks.tell("on_train_end")

    async def _begin(self) -> None:
        """Get the trainer ready, and finish the evaluation that an earlier session left undone."""
        with self.shutdown.interruptible():
            metrics = await self.trainer.begin()
            if self.trainer.version == 0:
                metrics |= await self._evaluate() if self._evaluates_first else {}
                metrics, _ = self._raise_alarms(metrics)
                self.tracker.log(0, metrics | self.clock.take())
            self.clock.take()
        if self._metrics_awaiting_eval is not None:
            await self._conclude(dict(self._metrics_awaiting_eval), evaluate=True)

    async def step(self) -> Metrics:
        """One step of the trainer, skipped if the guard decides so; `version` counts it either way. Raises
        `NonFiniteError`.
        """
        if self.shutdown.seconds_left < self._longest_step:
            self.shutdown.request_before_deadline()
        self.shutdown.check()
        before = self._position_before_step = self.trainer.position.state()
        self._callbacks.tell("on_step_begin")
        began = self.shutdown.now()
        with self.clock.measure("step"):
            try:
                metrics = await self.trainer.step()
            except NonFiniteError as error:
                if self._hooks.guard is None:
                    raise
                metrics = await self._hooks.guard.skip_step(error, before)
            else:
                if self._hooks.guard is not None:
                    self._hooks.guard.step_succeeded()
            is_due = self._triggers["refresh"].due(self.trainer.version + 1, self.trainer.position.epoch, last=False)
            if is_due and self._hooks.refresh_reference is not None:
                with self.clock.measure("update_ref_with_policy"):
                    await self._hooks.refresh_reference()
            if self._hooks.after_step is not None:
                await self._hooks.after_step(self.trainer.version + 1)
        self._longest_step = max(self._longest_step, self.shutdown.now() - began)
        self.trainer.version, self._position_before_step = self.trainer.version + 1, None
        return metrics | self.trainer.position.metrics() | {"trainer/global_step": self.trainer.version}

    async def _go_back(self, error: NonFiniteError) -> None:
        """Return to the last checkpoint, and continue with the data after this batch. Raises `error` if the run has to
        end.
        """
        if self._hooks.guard is None:
            raise error
        self._hooks.guard.roll_back(error)
        state = await self._checkpoints.go_back()
        if state is None:
            raise NonFiniteError(f"{error} (there is no checkpoint to go back to)") from error
        self.load_state({**state, "unrecorded": None, **self.trainer.position.data()})
        self._hooks.guard.rolled_back(error)
        await self.trainer.begin()

    async def _conclude(self, metrics: Metrics, *, evaluate: bool) -> None:
        """Conclude a step: evaluation, record, export, checkpoint; every checkpoint has its record and export."""
        if evaluate:
            self._metrics_awaiting_eval = metrics
            with self.shutdown.interruptible():
                metrics = metrics | await self._evaluate()
        self._metrics_awaiting_eval = None
        metrics, wants_saving = self._raise_alarms(metrics)
        self.tracker.log(self.trainer.version, metrics | self.clock.take())
        control = self._callbacks.control
        ends = bool(self._callbacks.stopped_by) and self._triggers["save"].ever
        save = self._is_due("save") or wants_saving or control.should_save or ends
        control.should_save = control.should_evaluate = False
        if self._is_due("export"):
            await self._hooks.export(self.trainer.version)
        if save and self.trainer.version > self._saved_version:
            await self._save()

    def _raise_alarms(self, metrics: Metrics) -> tuple[Metrics, bool]:
        """The metrics with an `alarm/<name>` for each alarm that they raise, and whether one asks for a checkpoint."""
        raised = self._hooks.alarms.look(self.trainer.version, metrics)
        for alarm in raised:
            self._hooks.report_alarm(alarm)
        actions = {alarm.action for alarm in raised}
        wants_saving = "save" in actions or ("stop" in actions and self._triggers["save"].ever)
        return metrics | {f"alarm/{alarm.name}": 1.0 for alarm in raised}, wants_saving

    async def _save(self) -> None:
        with self.clock.measure("save_checkpoints"):
            await self._checkpoints.save(self.trainer.version, self.state())
        self._saved_version = self.trainer.version
        self._callbacks.tell("on_save")

    async def _saved_before_the_end(self, stop: Stopped) -> Stopped:
        """Save the last step if checkpoints are enabled, and report it as saved only after its files are written."""
        version = self.trainer.version
        if version > self._saved_version and self._triggers["save"].ever:
            await self._save()
        await self._checkpoints.finish()
        if version == self._saved_version > 0:
            return self.shutdown.stopped(f"Step {version} is saved: the same command continues after it.")
        return stop

    async def _evaluate(self) -> Metrics:
        if self._hooks.evaluate is None:
            return {}
        with self.clock.measure("eval"):
            metrics = await self._hooks.evaluate(self.trainer.version)
        self._callbacks.tell("on_evaluate", metrics)
        return metrics

    def _is_due(self, name: str) -> bool:
        version = self.trainer.version
        return self._triggers[name].due(version, self.trainer.position.epoch, last=version == self.total_steps)

    def state(self) -> dict[str, Any]:
        """The loop's state for a checkpoint: as it was after the last whole step."""
        return {
            "version": self.trainer.version,
            "seconds": self.clock.total,
            **(self._position_before_step or self.trainer.position.state()),
            "triggers": {name: trigger.state() for name, trigger in self._triggers.items()},
            "alarms": self._hooks.alarms.state(),
            "callbacks": self._callbacks.state(),
            "unrecorded": self._metrics_awaiting_eval,  # metrics of the last step, if its evaluation is still to come
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the step at which `state` was taken."""
        self.trainer.version = self._saved_version = int(state["version"])
        self.clock.total = float(state.get("seconds", 0.0))  # absent from older checkpoints of supervised runs
        self.trainer.position.load_state(state)
        for name, trigger in self._triggers.items():
            trigger.load_state(state.get("triggers", {}).get(name, {}))
        self._hooks.alarms.load_state(state.get("alarms", {}))
        self._callbacks.load_state(state.get("callbacks", {}))
        self._metrics_awaiting_eval = state.get("unrecorded")
        self._position_before_step = None
