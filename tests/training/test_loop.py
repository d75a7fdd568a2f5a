"""The training loop with a trainer that counts, a store in memory and a list of all that happened, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import pytest
from attrs import evolve

from skyrl.config import TrainerConfig
from skyrl.config.settings.alarms import AlarmConfig
from skyrl.errors import NonFiniteError, Stopped
from skyrl.tracking.timing import Clock
from skyrl.training.alarms import Alarms
from skyrl.training.loop import Hooks, TrainingLoop

NOTHING = TrainerConfig(eval_before_train=False, eval_interval=-1, ckpt_interval=-1, hf_save_interval=-1)


class World:
    """Everything that a loop is made of. An epoch has two steps."""

    def __init__(self, config: TrainerConfig, total_steps: int, **hooks: Any) -> None:
        self.events: list[str] = []
        self.records: dict[int, dict[str, float]] = {}
        self.saved: dict[int, dict[str, Any]] = {}
        self.failing: dict[int, BaseException] = {}
        """Number of the batch, counted from 1 -> what its step raises."""

        self.seconds_left, self.stop_at, self.reason = math.inf, math.inf, ""
        self.version, self.taken, self.looks = 0, 0, 0
        self.token_metric, self.position = "tokens", self
        defaults = Hooks(evaluate=self.evaluate, export=self.export, refresh_reference=self.refresh)
        self.loop = TrainingLoop(
            config,
            self,
            evolve(defaults, **hooks),
            total_steps=total_steps,
            tracker=self,  # type: ignore[arg-type]  # a stand-in
            clock=Clock(),
            shutdown=self,  # type: ignore[arg-type]  # a stand-in
            checkpoints=self,
        )

    # the shutdown's clock

    def now(self) -> float:
        """Seconds; each look at the clock takes one."""
        self.looks += 1
        return float(self.looks)

    # the trainer

    async def begin(self) -> dict[str, float]:
        self.events.append(f"begin {self.version}")
        return {"begun": 1.0}

    async def step(self) -> dict[str, float]:
        self.taken += 1
        self.events.append(f"batch {self.taken}")
        if self.taken in self.failing:
            raise self.failing[self.taken]
        return {"tokens": 12.0, "loss": 0.5}

    # its position

    @property
    def epoch(self) -> int:
        return self.taken // 2

    def metrics(self) -> dict[str, float]:
        return {"trainer/epoch": float(self.epoch)}

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken, "shaping": self.taken}

    def data(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]
        self.events.append(f"load batch {state['taken']}, shaping {state['shaping']}")

    # hooks

    async def evaluate(self, version: int) -> dict[str, float]:
        self.events.append(f"evaluate {version}")
        return {"eval/score": 0.25}

    async def export(self, version: int) -> None:
        self.events.append(f"export {version}")

    async def refresh(self) -> None:
        self.events.append("refresh")

    # the tracker

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(f"log {step}")
        self.records[step] = metrics

    # checkpoints

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        self.events.append(f"save {step}")
        self.saved[step] = dict(state)

    async def finish(self) -> None:
        self.events.append("finish")

    async def go_back(self) -> Mapping[str, Any] | None:
        return self.saved[max(self.saved)] if self.saved else None

    # signals

    def check(self) -> None:
        if self.version >= self.stop_at:
            self.reason = self.reason or "Ctrl-C"
        if self.reason:
            raise Stopped(self.reason, 75)

    def request_before_deadline(self) -> None:
        self.reason = "deadline"

    def stopped(self, details: str) -> Stopped:
        return Stopped(f"{self.reason}. {details}", 75)

    def interruptible(self) -> AbstractContextManager[None]:
        return nullcontext()


async def test_evaluation_reference_export_and_checkpoint_have_their_turns() -> None:
    config = evolve(
        NOTHING, eval_before_train=True, eval_interval=2, ckpt_interval=3, hf_save_interval=4,
        update_ref_every_epoch=True,
    )  # fmt: skip
    world = World(config, 5)
    await world.loop.run()
    assert world.events == [
        *("begin 0", "evaluate 0", "log 0"),
        *("batch 1", "log 1"),
        *("batch 2", "refresh", "evaluate 2", "log 2"),
        *("batch 3", "log 3", "save 3"),
        *("batch 4", "refresh", "evaluate 4", "log 4", "export 4"),
        *("batch 5", "evaluate 5", "log 5", "export 5", "save 5"),  # the last step has everything
        "finish",
    ]
    first, last = world.records[0], world.records[5]
    assert first == {"begun": 1.0, "eval/score": 0.25, "timing/eval": first["timing/eval"]}
    assert (last["loss"], last["eval/score"], last["trainer/epoch"], last["trainer/global_step"]) == (0.5, 0.25, 2.0, 5)
    assert last["trainer/tokens_per_second"] == pytest.approx(12.0 / last["timing/step"])
    assert last["memory/process_bytes"] > 1e7
    steps = [world.records[step]["timing/step"] for step in range(1, 6)]
    assert last["timing/all_steps"] == pytest.approx(sum(steps))
    measured = {"timing/step", "timing/all_steps", "timing/update_ref_with_policy", "timing/eval"}
    assert {name for name in world.records[2] if name.startswith("timing/")} == measured
    assert "timing/save_checkpoints" in world.records[4]  # that of step 3, after its record


async def test_what_nobody_asked_for_does_not_happen() -> None:
    world = World(NOTHING, 2, evaluate=None, refresh_reference=None)
    await world.loop.run()
    assert world.events == ["begin 0", "log 0", "batch 1", "log 1", "batch 2", "log 2", "finish"]
    config = evolve(NOTHING, eval_before_train=True, eval_interval=1, update_ref_every_epoch=True)
    world = World(config, 2, evaluate=None, refresh_reference=None)
    await world.loop.run()
    assert "timing/eval" not in world.records[2] and "timing/update_ref_with_policy" not in world.records[2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("action", "interval", "saves"),
    [("warn", 9, ["save 2"]), ("save", -1, ["save 1"]), ("stop", 9, ["save 1"]), ("stop", -1, [])],
    ids=["a warning: at the last step", "save", "stop", "stop where no checkpoint is wanted"],
)
async def test_an_alarm_is_logged_as_one_and_asks_for_a_checkpoint_where_its_action_does(
    action: Literal["warn", "save", "stop"], interval: int, saves: list[str]
) -> None:
    heard: list[str] = []
    high = AlarmConfig(name="high", metric="loss", when="above", threshold=0.1, window=1, action=action)
    watching = {"alarms": Alarms([high]), "report_alarm": lambda alarm: heard.append(alarm.name)}
    world = World(evolve(NOTHING, ckpt_interval=interval), 2, **watching)
    await world.loop.run()
    assert (heard, world.records[1]["alarm/high"]) == (["high"], 1.0)
    assert [event for event in world.events if event.startswith("save")] == saves


# Non-finite values


class Guard:
    """Skips steps, or goes back."""

    def __init__(self, events: Callable[[], list[str]], *, skips: bool) -> None:
        self._events, self._skips = events, skips

    def step_succeeded(self) -> None:
        self._events().append("passed")

    async def skip_step(self, error: NonFiniteError, before: Mapping[str, Any]) -> dict[str, float]:
        if not self._skips:
            raise error
        self._events().append(f"skip from batch {before['taken']}")
        return {"trainer/skipped_steps": 1.0}

    def roll_back(self, error: NonFiniteError) -> None:
        self._events().append("roll back")

    def rolled_back(self, error: NonFiniteError) -> None:
        self._events().append("rolled back")


def guarded(*, skips: bool, **changes: Any) -> World:
    world: World
    world = World(evolve(NOTHING, **changes), 3, guard=Guard(lambda: world.events, skips=skips))
    world.failing = {3: NonFiniteError("nan")}
    return world


async def test_a_step_that_is_left_out_counts_as_a_step() -> None:
    world = guarded(skips=True)
    await world.loop.run()
    assert world.events[6:] == ["passed", "log 2", "batch 3", "skip from batch 2", "log 3", "finish"]
    assert world.records[3]["trainer/skipped_steps"] == world.records[3]["trainer/global_step"] - 2 == 1
    assert world.records[3]["trainer/tokens_per_second"] == 0


async def test_a_run_that_goes_back_resumes_with_the_batch_after_the_one_that_failed() -> None:
    world = guarded(skips=False, ckpt_interval=1)
    await world.loop.run()
    assert world.events[10:] == [
        *("batch 3", "roll back", "load batch 3, shaping 2", "rolled back", "begin 2"),
        *("batch 4", "passed", "log 3", "save 3", "finish"),
    ]


async def test_without_a_guard_or_a_checkpoint_a_non_finite_value_ends_the_run() -> None:
    with pytest.raises(NonFiniteError, match=r"^nan \(there is no checkpoint to go back to\)$"):
        await guarded(skips=False).loop.run()
    world = World(evolve(NOTHING, ckpt_interval=1), 3)
    world.failing = {3: NonFiniteError("nan")}
    with pytest.raises(NonFiniteError, match="^nan$"):
        await world.loop.run()


# The end before the end


@pytest.mark.parametrize(
    ("every", "stop_at", "saves", "message"),
    [
        (10, 2, ["save 2"], r"^Ctrl-C\. Step 2 is saved: the same command continues after it\.$"),
        (2, 2, ["save 2"], r"^Ctrl-C\. Step 2 is saved"),  # once
        (-1, 2, [], "^Ctrl-C$"),
        (10, 0, [], "^Ctrl-C$"),  # nothing was learned
    ],
)
async def test_a_run_that_is_stopped_saves_its_last_step_where_checkpoints_are_wanted(
    every: int, stop_at: int, saves: list[str], message: str
) -> None:
    world = World(evolve(NOTHING, ckpt_interval=every), 5)
    world.stop_at = stop_at
    with pytest.raises(Stopped, match=message):
        await world.loop.run()
    assert [event for event in world.events if event.startswith("save")] == saves
    assert world.events[-1] == "finish"


@pytest.mark.parametrize(("seconds_left", "steps"), [(0.0, 1), (-1.0, 0), (math.inf, 3)])
async def test_no_step_begins_that_could_not_end_before_the_deadline(seconds_left: float, steps: int) -> None:
    world = World(NOTHING, 3)
    world.seconds_left = seconds_left  # less than any step took, once one was measured
    ends = pytest.raises(Stopped, match="^deadline$") if steps < 3 else nullcontext()
    with ends:
        await world.loop.run()
    assert world.version == steps


async def test_a_resumed_run_makes_up_for_the_evaluation_that_was_interrupted() -> None:
    async def interrupted(version: int) -> dict[str, float]:
        raise Stopped("Ctrl-C", 75)

    config = evolve(NOTHING, eval_before_train=True, eval_interval=1, ckpt_interval=10)
    world = World(config, 2, evaluate=interrupted)
    world.loop._evaluates_first = False
    with pytest.raises(Stopped):
        await world.loop.run()
    state = world.saved[1]
    assert (state["version"], state["taken"], state["unrecorded"]["loss"]) == (1, 1, 0.5)
    resumed = World(config, 2)
    resumed.loop.load_state(state)
    await resumed.loop.run()
    assert resumed.events == [
        *("load batch 1, shaping 1", "begin 1", "evaluate 1", "log 1"),
        *("batch 2", "evaluate 2", "log 2", "save 2", "finish"),
    ]
    assert resumed.records[2]["timing/all_steps"] > state["seconds"] > 0
    assert resumed.loop.state()["unrecorded"] is None
    resumed.loop.load_state({name: value for name, value in state.items() if name != "seconds"})  # of an older release
    assert resumed.loop.state()["seconds"] == 0.0


async def test_a_step_that_was_cut_off_is_begun_again_with_its_own_batch() -> None:
    world = World(evolve(NOTHING, ckpt_interval=10), 3)
    world.failing = {2: Stopped("Ctrl-C", 75)}
    with pytest.raises(Stopped):
        await world.loop.run()
    assert world.saved[1]["taken"] == 1  # the second batch was taken and not learned from
