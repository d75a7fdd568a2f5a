"""Callbacks: a user's class that hears the events of the training loop, and may ask it to evaluate, save or stop.

    class StopAt(skyrl.Callback):
        def on_evaluate(self, state, control, metrics):
            control.should_training_stop = metrics["eval/all/avg_score"] > 0.9

Events and requests have the names of `transformers.TrainerCallback` where that has them. The methods are called in the
thread of the loop, in the order of the configuration, and the run waits for each.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from skyrl.errors import CallbackError, ConfigError, Problem, UserError
from skyrl.tree.frames import described
from skyrl.tree.imports import import_object
from skyrl.tree.names import nearest

R = TypeVar("R")

if TYPE_CHECKING:
    from skyrl.trajectory import TrajectoryGroup


@attrs.frozen(kw_only=True)
class TrainingState:
    """Where the run is when an event happens."""

    step: int
    """Number of complete training steps, over all sessions."""

    total_steps: int
    """Number of steps of the whole run."""

    epoch: int
    """Number of complete passes over the data."""

    folder: Path
    """The run's own folder."""


@attrs.define
class Control:
    """Requests to the loop. It grants them at the end of the step, and resets each once it is granted."""

    should_training_stop: bool = False
    """Finish the run as if this step were its last. A checkpoint is written if the run writes any."""

    should_save: bool = False
    """Write a checkpoint, even if the run writes none by itself."""

    should_evaluate: bool = False
    """Evaluate this step, if the run has evaluation data."""


class Callback:
    """Hears the events of a run. Derive from it, and override the events that are of interest: none does anything.

    An exception of a method ends the run; checkpoints stay. With `state_dict` and `load_state_dict`, a callback goes on
    after a resume, and after a return to a checkpoint, where it was.
    """

    def on_train_begin(self, state: TrainingState, control: Control) -> None:
        """A session begins: before the first step, or after a checkpoint was loaded."""

    def on_train_end(self, state: TrainingState, control: Control) -> None:
        """A session ends in order: the run is finished or was asked to stop, and its checkpoints are written."""

    def on_step_begin(self, state: TrainingState, control: Control) -> None:
        """A training step begins."""

    def on_rollouts(self, state: TrainingState, control: Control, groups: Sequence[TrajectoryGroup]) -> None:
        """Reinforcement learning: the samples of the step are rewarded, and nothing is learned from them yet."""

    def on_weights_sent(self, state: TrainingState, control: Control, version: int) -> None:
        """Reinforcement learning: the engines have the weights of this version, or older ones until one is due."""

    def on_step_end(self, state: TrainingState, control: Control, metrics: Mapping[str, float]) -> None:
        """A training step is complete. `metrics` are those of the step, without an evaluation."""

    def on_evaluate(self, state: TrainingState, control: Control, metrics: Mapping[str, float]) -> None:
        """An evaluation is complete. `metrics` are those of the evaluation."""

    def on_save(self, state: TrainingState, control: Control) -> None:
        """A checkpoint of this step was taken, with the state of the callbacks. With `async_ckpt_save`, its files may
        still be being written. A stop that is asked for here is not stored in it: a resumed run continues.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint: plain data, as JSON has it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` gave `state`."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""Names of the events."""


class Callbacks:
    """All callbacks of a run."""

    def __init__(
        self,
        callbacks: Mapping[str, Callback],
        *,
        total_steps: int = 0,
        folder: Path = Path(),
        say: Callable[[str], None] = print,
    ) -> None:
        """`callbacks` have the names that checkpoints and messages use. `say` prints a message about the run."""
        self._callbacks, self._total_steps, self._folder, self._say = dict(callbacks), total_steps, folder, say
        self._position: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.control = Control()
        self.stopped_by = ""
        """Name of the callback that ended the run; empty if none has."""

    def watch(self, position: Callable[[], tuple[int, int]]) -> None:
        """Take the step and the epoch of events from `position`."""
        self._position = position

    def tell(self, event: str, *args: object) -> None:
        """Call the event's method of every callback. Raises `CallbackError`."""
        if not self._callbacks:
            return
        step, epoch = self._position()
        state = TrainingState(step=step, total_steps=self._total_steps, epoch=epoch, folder=self._folder)
        for name, callback in self._callbacks.items():
            _call_user(name, event, getattr(callback, event), state, self.control, *args)
            if self.control.should_training_stop:
                self.stopped_by = self.stopped_by or name

    def rollouts(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """The samples of a step are ready."""
        self.tell("on_rollouts", groups)

    def weights_sent(self, metrics: Mapping[str, float], version: int) -> None:
        """Weights were sent to the engines, or noted until a transfer is due."""
        self.tell("on_weights_sent", version)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint. Raises `CallbackError` for the state of a callback that is not plain data."""
        if not self._callbacks:
            return {}
        states = {name: _call_user(name, "state_dict", _plain_state, item) for name, item in self._callbacks.items()}
        return {"stopped_by": self.stopped_by, "control": attrs.asdict(self.control), "states": states}

    def stopping(self, state: Mapping[str, Any]) -> str:
        """The callback that ended the run where `state` was taken; empty if none did, or if the run lacks it now."""
        name = str(state.get("stopped_by", ""))
        return name if name in self._callbacks else ""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. A callback that is new begins as it is; the state of one that the run no
        longer has is dropped, and a message says so. Raises `CallbackError`.
        """
        stored = state.get("states", {})
        self.stopped_by = self.stopping(state)
        self.control = Control(**state.get("control", {}))
        self.control.should_training_stop = bool(self.stopped_by)
        for name in stored.keys() - self._callbacks.keys():
            if stored[name]:
                self._say(f"The checkpoint has the state of the callback {name}, which this run does not have.")
        for name, callback in self._callbacks.items():
            if name in stored:
                _call_user(name, "load_state_dict", callback.load_state_dict, stored[name])


def callbacks_by_name(named: Sequence[str], instances: Sequence[Callback], *, field: str) -> dict[str, Callback]:
    """The callbacks that import paths name, then those given as objects, which are named by their classes.

    Raises `ConfigError` for one that cannot be used; `field` is the place of the import paths.
    """
    result: dict[str, Callback] = {}
    for name in named:
        target = load_callback(name, field)
        try:
            result[name] = target() if isinstance(target, type) else target
        except Exception as error:
            message = f"{name} cannot be created without arguments: {described(error)}"
            raise ConfigError([Problem(path=field, message=message)]) from error
    for callback in instances:
        kind = type(callback)
        name = f"{kind.__module__}:{kind.__qualname__}"
        _refuse_unusable(callback, name, "callbacks")
        alike = sum(item.partition(" ")[0] == name for item in result)
        result[f"{name} {alike + 1}" if alike else name] = callback
    return result


def load_callback(name: str, field: str) -> type[Callback] | Callback:
    """The class or object that an import path names. Raises `ConfigError` if it is no callback."""
    try:
        target = import_object(name)
    except UserError as error:
        raise ConfigError([Problem(path=field, message=str(error))]) from error
    _refuse_unusable(target, name, field)
    callback: type[Callback] | Callback = target
    return callback


def _refuse_unusable(candidate: object, name: str, field: str) -> None:
    """Raise `ConfigError` for what is no callback, for a method that is no event, and for a coroutine function."""
    kind = candidate if isinstance(candidate, type) else type(candidate)
    if not issubclass(kind, Callback):
        message, hint = f"{name} is not a callback", "derive its class from skyrl.Callback"
        raise ConfigError([Problem(path=field, message=message, hint=hint)])
    problems = []
    for method in sorted({item for item in dir(kind) if item.startswith("on_")}):
        near = nearest(method, EVENTS)
        if method not in EVENTS:
            hint = f"did you mean {near}?" if near else f"events: {', '.join(EVENTS)}"
            problems.append(Problem(path=field, message=f"{name} has {method}, which is no event", hint=hint))
        elif inspect.iscoroutinefunction(getattr(kind, method)):
            hint = "make it a plain function: the run waits for it"
            problems.append(Problem(path=field, message=f"{name}.{method} is a coroutine function", hint=hint))
    if problems:
        raise ConfigError(problems)


def _call_user(name: str, event: str, method: Callable[..., R], *args: object) -> R:
    try:
        return method(*args)
    except Exception as error:
        raise CallbackError(f"the callback {name} failed in {event}: {described(error)}") from error


def _plain_state(callback: Callback) -> Mapping[str, Any]:
    """The state of a callback, if it is plain data. Raises TypeError or ValueError."""
    state = callback.state_dict()
    json.dumps(state, allow_nan=False)
    return dict(state)
