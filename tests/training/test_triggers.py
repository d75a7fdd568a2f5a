from __future__ import annotations

import pytest

from skyrl.config import ConfigError, TrainerConfig
from skyrl.config.foundation.intervals import Interval, ParsedInterval, read_interval
from skyrl.training.loop import Trigger


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (10, ParsedInterval(steps=10)),
        ("10 steps", ParsedInterval(steps=10)),
        ("1 step", ParsedInterval(steps=1)),
        ("2 epochs", ParsedInterval(epochs=2)),
        ("30m", ParsedInterval(seconds=1800)),
        ((100, "1 epoch", "30m"), ParsedInterval(steps=100, epochs=1, seconds=1800)),
        (-1, ParsedInterval()),
        (0, ParsedInterval()),
        ((), ParsedInterval()),
    ],
)
def test_an_interval_is_steps_epochs_or_a_time(written: Interval, meant: ParsedInterval) -> None:
    assert read_interval(written) == meant
    assert TrainerConfig(ckpt_interval=written).ckpt_interval == written
    assert meant.ever == (meant != ParsedInterval())


@pytest.mark.parametrize("written", [-2, "soon", "10", "1 week", "0.5 epochs", ("30m", "1h"), ("1 epoch", "2 epochs")])
def test_what_is_no_interval_is_refused(written: Interval) -> None:
    with pytest.raises(ConfigError, match="ckpt_interval +.*is not an interval"):
        TrainerConfig(ckpt_interval=written)


def due(trigger: Trigger, steps: range, epochs_at: dict[int, int] | None = None, last: int = 1000) -> list[int]:
    """The steps after which it is due."""
    epochs, due_steps = 0, []
    for step in steps:
        epochs = (epochs_at or {}).get(step, epochs)
        if trigger.due(step, epochs, last=step == last):
            due_steps.append(step)
    return due_steps


def test_steps_count_from_the_first_and_the_last_is_always_due() -> None:
    assert due(Trigger(3), range(1, 9), last=8) == [3, 6, 8]
    assert due(Trigger(-1), range(1, 9), last=8) == []


def test_an_epoch_is_due_once_after_it_is_complete() -> None:
    assert due(Trigger("1 epoch"), range(1, 9), {3: 1, 6: 2}) == [3, 6]
    assert due(Trigger("1 epoch"), range(1, 3), {1: 1, 2: 2}) == [1, 2]  # epochs of one step
    assert due(Trigger("2 epochs"), range(1, 9), {2: 1, 4: 2, 6: 3, 8: 4}) == [4, 8]
    assert due(Trigger("1 epoch"), range(1, 4), {2: 3}) == [2]  # several at once, where batches are dropped


def test_a_time_counts_from_its_own_last_time() -> None:
    time = Time()
    trigger = Trigger((2, "10s"), now=time)
    fire_times = []
    for step in range(1, 7):
        time.now += 4
        if trigger.due(step, 0, last=False):
            fire_times.append((step, time.now))
    # the steps 2, 4, 6; and 12 s, which the save after step 2 did not put off; then 24 s
    assert fire_times == [(2, 8), (3, 12), (4, 16), (6, 24)]


def test_a_timer_goes_on_where_the_session_before_it_ended() -> None:
    time = Time()
    before = Trigger("10s", now=time)
    time.now = 7
    state = before.state()
    time.now = 500  # the run was not running
    after = Trigger("10s", now=time)
    after.load_state(state)
    time.now = 502
    assert not after.due(1, 0, last=False)
    time.now = 503
    assert after.due(2, 0, last=False)


def test_an_epoch_that_was_seen_is_not_due_again_after_a_restart() -> None:
    before, after = Trigger("1 epoch"), Trigger("1 epoch")
    assert due(before, range(1, 4), {2: 1}) == [2]
    after.load_state(before.state())
    assert due(after, range(4, 6), {4: 1, 5: 2}) == [5]
