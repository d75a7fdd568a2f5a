"""Observables of the training loop: when it evaluates, saves and exports, and what follows a failure."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl.errors import BatchError, RunError
from skyrl.experiments.experiment import experiment_class
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.runs import recovery, session
from skyrl.runs.session import RunSession
from skyrl.tracking.timing import Clock
from skyrl.training.guards import NonFiniteGuard
from skyrl.training.loop import Hooks, TrainingLoop
from tests.effects.probe import Scene, observable


class ScriptedLoop:
    """A loop over six steps of three epochs, whose collaborators do nothing but note that they were called."""

    def __init__(self, trainer: Any, bad_steps: Mapping[int, int] | None = None) -> None:
        """`bad_steps` says how often the step after a version fails for a NaN."""
        self.events: list[str] = []
        self.version = self.taken = 0
        self.bad = dict(bad_steps or {})
        self.position = self.weights = self
        self.token_metric = "tokens"
        hooks = Hooks(
            evaluate=self._evaluate,
            export=self._export,
            refresh_reference=self._refresh,
            guard=NonFiniteGuard(trainer.faults, self),  # type: ignore[arg-type]  # it has what the guard calls
        )
        self.loop = TrainingLoop(
            trainer,
            self,
            hooks,
            total_steps=6,
            tracker=self,
            clock=Clock(),
            shutdown=ShutdownSignal(grace=1.0),
            checkpoints=self,
        )

    def run(self) -> list[str]:
        with redirect_stderr(StringIO()):
            try:
                asyncio.run(self.loop.run())
            except RunError as error:
                self.events.append(type(error).__name__)
        return self.events

    # The trainer, which is its own position and sends its own weights.

    async def begin(self) -> dict[str, float]:
        return {}

    async def publish(self, version: int) -> dict[str, float]:
        return {}

    async def step(self) -> dict[str, float]:
        if self.bad.get(self.version, 0) > 0:
            self.bad[self.version] -= 1
            self.events.append(f"NaN after {self.version}")
            raise BatchError("reward nan")
        return {}

    @property
    def epoch(self) -> int:
        return (self.version + 1) // 2

    def state(self) -> dict[str, Any]:
        return {}

    data = metrics = state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    take_back_shaping = load_state

    # The hooks, the tracker and the checkpoints.

    async def _evaluate(self, version: int) -> dict[str, float]:
        self.events.append(f"evaluated {version}")
        return {}

    async def _export(self, step: int) -> None:
        self.events.append(f"exported {step}")

    async def _refresh(self) -> None:
        self.events.append(f"refreshed after {self.version}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing is logged."""

    def close(self) -> None:
        """Nothing is open."""

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        self.events.append(f"saved {step}")
        self.saved = dict(state)

    async def finish(self) -> None:
        """Nothing is pending."""

    async def go_back(self) -> Mapping[str, Any] | None:
        self.events.append("went back")
        return getattr(self, "saved", None)


@observable("the steps of six after which the loop evaluates, saves, exports and refreshes the reference")
def course(scene: Scene) -> object:
    return ScriptedLoop(scene.run.trainer).run()


@observable("the course of a run in which the batches of some steps hold NaN")
def course_with_nan(scene: Scene) -> object:
    return ScriptedLoop(scene.run.trainer, bad_steps={3: 2, 4: 1, 5: 1}).run()


@observable("the attempts at a run that fails each time")
def attempts(scene: Scene) -> object:
    count = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()):
        patch.setattr(recovery, "PAUSE", 0.0)
        try:
            for attempt in recovery.attempts(scene.run):
                count += 1
                with attempt:
                    raise RunError("a rank is gone")
        except RunError:
            return count
    return count


@observable("what is printed, and whether the run ends, when nothing comes to its end any more")
def stall(scene: Scene) -> object:
    """The watchdog sees a stall as soon as it is there, in place of one that lasts as long as the field says."""
    printed = StringIO()

    class Stalled:
        def __init__(self, progress: object, seconds: float, *, on_stall: Any, field: str, **_: object) -> None:
            on_stall(f"no progress ({field} = {seconds:g})")

        def close(self) -> None:
            """There is no thread."""

    experiment = experiment_class(scene.run)(scene.run)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(printed):
        patch.setattr(session, "Watchdog", Stalled)
        RunSession(experiment)._watch_progress()
    return printed.getvalue(), experiment.shutdown.requested


@observable("whether a run is asked to stop at once")
def stop(scene: Scene) -> object:
    return experiment_class(scene.run)(scene.run).shutdown.seconds_left <= 0


@observable("the message of a run that was asked to stop and did not, within its grace period")
def grace(scene: Scene) -> object:
    """On a clock that only waiting advances."""
    words: list[str] = []
    shutdown = experiment_class(scene.run)(scene.run).shutdown
    seconds = 0.0

    class Poll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            nonlocal seconds
            seconds += milliseconds / 1000
            return self._poll.poll(0)

    def end(reason: str) -> None:
        words.append(reason)
        shutdown._ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.processes.shutdown.select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
        patch.setattr(shutdown, "now", lambda: seconds)
        patch.setattr(shutdown, "_end_at_once", end)
        with shutdown:
            shutdown.request("Stopped")
            shutdown._thread.join()
    return words
