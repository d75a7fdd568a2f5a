"""Callbacks: what they hear of the training loop, what they may ask it for, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.errors import CallbackError, ConfigError, NonFiniteError, Stopped
from skyrl.training.callbacks import EVENTS, Callback, Callbacks, Control, TrainingState, callbacks_by_name
from skyrl.training.guards import NonFiniteGuard
from tests.training.test_loop import NOTHING, World

EVERYTHING = evolve(NOTHING, eval_before_train=True, eval_interval=2, ckpt_interval=2)
IN_A_LOOP = [event for event in EVENTS if event not in ("on_rollouts", "on_weights_sent")]
"""Events that do not come from collaborators of a trainer."""


class Hearing(Callback):
    """Notes each event and the step that it happens at, and asks for what `asks` says at an event and step."""

    def __init__(self, asks: Mapping[tuple[str, int], Sequence[str]] | None = None) -> None:
        self.asks = asks or {}
        self.heard: list[str] = []

    def _hear(self, event: str, state: TrainingState, control: Control) -> None:
        self.heard.append(f"{event.removeprefix('on_')} {state.step}")
        for request in self.asks.get((event, state.step), ()):
            setattr(control, request, True)

    def on_train_begin(self, state: TrainingState, control: Control) -> None:
        self._hear("on_train_begin", state, control)

    def on_train_end(self, state: TrainingState, control: Control) -> None:
        self._hear("on_train_end", state, control)

    def on_step_begin(self, state: TrainingState, control: Control) -> None:
        self._hear("on_step_begin", state, control)

    def on_step_end(self, state: TrainingState, control: Control, metrics: Mapping[str, float]) -> None:
        assert (metrics["loss"], metrics["trainer/global_step"]) == (0.5, state.step)
        self._hear("on_step_end", state, control)

    def on_evaluate(self, state: TrainingState, control: Control, metrics: Mapping[str, float]) -> None:
        assert metrics == {"eval/score": 0.25}
        self._hear("on_evaluate", state, control)

    def on_save(self, state: TrainingState, control: Control) -> None:
        self._hear("on_save", state, control)

    def state_dict(self) -> dict[str, Any]:
        return {"heard": list(self.heard)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heard = list(state["heard"])


def all_of(*callbacks: Callback) -> Callbacks:
    """The callbacks under the names a, b, ..."""
    return Callbacks(dict(zip("abc", callbacks, strict=False)), total_steps=3, folder=Path("run"))


async def test_a_callback_hears_every_event_in_the_order_of_the_loop() -> None:
    hearing = Hearing()
    await World(EVERYTHING, 3, callbacks=all_of(hearing)).loop.run()
    assert hearing.heard == [
        *("train_begin 0", "evaluate 0"),
        *("step_begin 0", "step_end 1"),
        *("step_begin 1", "step_end 2", "evaluate 2", "save 2"),
        *("step_begin 2", "step_end 3", "evaluate 3", "save 3"),
        "train_end 3",
    ]


async def test_a_callback_is_told_where_the_run_is() -> None:
    class Noting(Callback):
        noted: TrainingState | None = None

        def on_step_end(self, state: TrainingState, control: Control, metrics: Mapping[str, float]) -> None:
            self.noted = state

    noting = Noting()
    await World(NOTHING, 3, callbacks=all_of(noting)).loop.run()
    assert noting.noted == TrainingState(step=3, total_steps=3, epoch=1, folder=Path("run"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("event", "step", "requests", "interval", "heard"),
    [
        ("on_step_end", 1, ["should_evaluate"], -1, ["evaluate 1"]),
        ("on_step_begin", 0, ["should_evaluate"], -1, ["evaluate 1"]),
        ("on_step_end", 1, ["should_save"], -1, ["save 1"]),
        ("on_train_begin", 0, ["should_save"], -1, ["save 1"]),
        ("on_step_end", 2, ["should_evaluate", "should_save"], -1, ["evaluate 2", "save 2"]),
        ("on_step_end", 2, ["should_training_stop"], -1, []),
        ("on_step_end", 2, ["should_training_stop"], 9, ["save 2"]),
    ],
)
async def test_a_request_is_granted_once_at_the_end_of_the_step(
    event: str, step: int, requests: Sequence[str], interval: int, heard: Sequence[str]
) -> None:
    hearing = Hearing({(event, step): requests})
    world = World(evolve(NOTHING, ckpt_interval=interval), 3, callbacks=all_of(hearing))
    await world.loop.run()
    assert [event for event in hearing.heard if event.startswith(("evaluate", "save"))] == [
        *heard,
        *(["save 3"] if interval > 0 and "should_training_stop" not in requests else []),
    ]
    assert world.version == (2 if "should_training_stop" in requests else 3)
    assert hearing.heard[-1] == f"train_end {world.version}"


async def test_a_stop_of_an_evaluation_is_in_the_checkpoint_of_its_step_until_the_callback_is_left_out() -> None:
    world = World(EVERYTHING, 5, callbacks=all_of(Hearing({("on_evaluate", 2): ["should_training_stop"]})))
    await world.loop.run()
    assert (world.version, [*world.saved]) == (2, [2])
    stored = world.saved[2]["callbacks"]
    assert all_of(Hearing()).stopping(stored) == "a"
    assert Callbacks({"other": Hearing()}, say=lambda text: None).stopping(stored) == ""


async def test_the_state_of_a_callback_is_given_back_on_resume() -> None:
    config = evolve(NOTHING, ckpt_interval=2)
    await (first := World(config, 3, callbacks=all_of(Hearing()))).loop.run()
    resumed, uninterrupted = Hearing(), Hearing()
    second = World(config, 3, callbacks=all_of(resumed))
    second.loop.load_state(first.saved[2])
    assert resumed.heard == ["train_begin 0", "step_begin 0", "step_end 1", "step_begin 1", "step_end 2"]
    await second.loop.run()
    await World(config, 3, callbacks=all_of(uninterrupted)).loop.run()
    assert [event for event in resumed.heard if event != "train_begin 2"] == [
        event
        for event in uninterrupted.heard
        if event != "save 2"  # which follows the checkpoint that it is about
    ]


async def test_a_return_to_a_checkpoint_takes_back_the_state() -> None:
    hearing = Hearing()
    config = evolve(NOTHING, ckpt_interval=1)
    world = World(config, 3, callbacks=all_of(hearing))
    trainer: Any = world
    guard = NonFiniteGuard(evolve(config.faults, on_non_finite="roll_back"), trainer)
    world.loop._hooks = evolve(world.loop._hooks, guard=guard)
    world.failing[2] = NonFiniteError("NaN")
    await world.loop.run()
    assert hearing.heard.count("step_begin 1") == 1  # that of the step that was taken back is forgotten


async def test_a_stop_while_a_step_is_evaluated_keeps_what_was_asked_for() -> None:
    hearing = Hearing({("on_step_end", 1): ["should_save", "should_evaluate"]})
    world = World(evolve(NOTHING, ckpt_interval=9), 2, callbacks=all_of(hearing))

    async def stopped(version: int) -> dict[str, float]:
        raise Stopped("Ctrl-C")

    world.loop._hooks = evolve(world.loop._hooks, evaluate=stopped)
    with pytest.raises(Stopped):
        await world.loop.run()
    assert world.saved[1]["callbacks"]["control"]["should_evaluate"]
    assert hearing.heard[-1] == "train_end 1"


def failing_in(event: str) -> Callback:
    """A callback whose method for this event raises."""

    def fail(self: Callback, *_: object) -> None:
        raise KeyError("answer")

    failing: Callback = type("Failing", (Callback,), {event: fail})()
    return failing


@pytest.mark.parametrize("event", [*IN_A_LOOP, "state_dict"])
async def test_an_exception_of_a_callback_ends_the_run_with_its_name_and_the_event(event: str) -> None:
    world = World(EVERYTHING, 3, callbacks=all_of(failing_in(event)))
    with pytest.raises(CallbackError, match=rf"callback a failed in {event}: KeyError: 'answer' \(tests.*, in fail\)"):
        await world.loop.run()


@pytest.mark.parametrize("event", ["on_rollouts", "on_weights_sent"])
def test_an_exception_on_what_a_collaborator_did_is_named_in_the_same_way(event: str) -> None:
    callbacks = all_of(failing_in(event))
    tell = {"on_rollouts": lambda: callbacks.rollouts((), 0), "on_weights_sent": lambda: callbacks.weights_sent({}, 1)}
    with pytest.raises(CallbackError, match=f"callback a failed in {event}: KeyError"):
        tell[event]()


@pytest.mark.parametrize("state", [{"a": float("nan")}, {"a": {1}}, {"a": Path("x")}, {"a": b"x"}, {"a": object()}])
def test_a_state_that_is_not_plain_data_is_refused(state: dict[str, Any]) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return state

    with pytest.raises(CallbackError, match="callback a failed in state_dict: (TypeError|ValueError)"):
        all_of(Odd()).state()


def test_the_state_of_a_callback_that_is_gone_is_reported() -> None:
    messages: list[str] = []
    stored = all_of(Hearing(), Callback()).state()
    Callbacks({}, say=messages.append).load_state(stored)
    assert messages == ["The checkpoint has the state of the callback a, which this run does not have."]


USABLE = """
import skyrl
class Counts(skyrl.Callback):
    pass
counts = Counts()
"""

UNUSABLE = {
    "from skyrl import Callback\nclass X(Callback):\n def on_step_ended(self, state, control): ...": (
        "has on_step_ended, which is no event(.|\n)*did you mean on_step_end"
    ),
    "from skyrl import Callback\nclass X(Callback):\n def on_anything(self): ...": "on_anything, which is no event",
    "from skyrl import Callback\nclass X(Callback):\n async def on_save(self, state, control): ...": (
        "X.on_save is a coroutine function"
    ),
    "from skyrl import Callback\nclass X(Callback):\n def __init__(self, n): ...": "cannot be created without arg",
    "class X:\n def on_save(self, state, control): ...": "X is not a callback(.|\n)*skyrl.Callback",
    "def X(): ...": "X is not a callback",
    "Y = 1": "has no 'X'",
    "import nothing_of_this_name": "nothing_of_this_name",
}


@pytest.mark.parametrize("name", ["Counts", "counts"])
def test_an_import_path_names_a_class_or_an_object(tmp_path: Path, name: str) -> None:
    (tmp_path / "counts.py").write_text(USABLE)
    [callback] = callbacks_by_name([f"{tmp_path}/counts.py:{name}"], [], field="callbacks").values()
    assert isinstance(callback, Callback)


@pytest.mark.parametrize(("source", "message"), UNUSABLE.items())
def test_what_is_no_callback_is_refused_with_the_field(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "unusable.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as refused:
        callbacks_by_name([f"{tmp_path}/unusable.py:X"], [], field="trainer.callbacks")
    assert {problem.path for problem in refused.value.problems} == {"trainer.callbacks"}


def test_objects_of_one_class_have_different_names() -> None:
    names = [*callbacks_by_name([], [Hearing(), Hearing(), Callback()], field="callbacks")]
    path = f"{__name__}:Hearing"
    assert names == [path, f"{path} 2", "skyrl.training.callbacks:Callback"]
