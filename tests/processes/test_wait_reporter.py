"""What a long wait is for is reported once, and again only where it takes much longer than before."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from skyrl.processes.progress import Progress, WaitReporter
from skyrl.rollout.env_calls import SamplesInFlight
from skyrl.rollout.threads import ThreadCall


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_reported_once_after_ten_seconds_and_a_longer_one_of_its_kind_after_twice_the_time() -> None:
    time, messages = Time(), list[str]()
    progress = Progress(time)
    silence = WaitReporter(progress, messages.append)
    with progress.waiting_for("step"), progress.waiting_for("generate"):
        for time.now in (9.0, 10.0, 11.0, 30.0):
            silence.look()
    assert messages == ["waiting for: generate (for 10 s)"]
    with progress.waiting_for("generate"):
        for time.now in (50.0, 89.0, 90.0, 95.0):
            silence.look()
    assert messages[1:] == ["waiting for: generate (for 60 s)"]


def test_waits_are_named_together_with_what_is_known_of_the_samples() -> None:
    time, messages = Time(), list[str]()
    progress, samples = Progress(time), SamplesInFlight(time)
    progress.details = samples.__str__
    silence, call = WaitReporter(progress, messages.append), ThreadCall(lambda: None)
    with progress.waiting_for("generate"):
        samples.begin(128)
        samples.end(125)
        time.now = call.start_time = 3.0
        with samples.in_environment(call):
            time.now = 15.0
            silence.look()
    assert messages == [
        "waiting for: generate (for 15 s); 3 of 128 samples, 1 call of environments, the oldest for 12 s",
    ]


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        (["generate"], "generate (for 20 s)"),
        (["a.generate"] * 3, "a.generate (3 times, for up to 20 s)"),
        (["engine-0 in E.generate"] * 128, "engine-0 in E.generate (128 times, for up to 20 s)"),
        (
            ["engine-0 in E.generate", "engine-1 in E.generate"],
            "engine-0 and 1 other in E.generate (2 times, for up to 20 s)",
        ),
        (
            [f"engine-{number % 8} in E.generate" for number in range(64)],
            "engine-0 and 7 others in E.generate (64 times, for up to 20 s)",
        ),
        (
            ["generate", *(f"policy-{rank} in P.update" for rank in range(8)), "engine-0 in E.wake", "saving", "data"],
            "generate (for 20 s); policy-0 and 7 others in P.update (8 times, for up to 19 s); "
            "engine-0 in E.wake (for 19 s); saving (for 19 s); and 1 more",
        ),
    ],
)
def test_what_is_waited_for_is_named_once_with_a_count(waits: list[str], expected: str) -> None:
    time, heard = Time(), list[str]()
    progress = Progress(time)
    with ExitStack() as stack:
        for number, wait in enumerate(waits):
            time.now = min(number, 1)  # the first has waited for the longest
            stack.enter_context(progress.waiting_for(wait))
        time.now = 20.0
        WaitReporter(progress, heard.append).look()
    assert heard == [f"waiting for: {expected}"]
    assert len(progress.waits()) == 0


def test_samples_that_no_environment_has_are_in_the_engines_and_a_new_batch_is_counted_anew() -> None:
    samples = SamplesInFlight()
    assert str(samples) == ""
    samples.begin(4)
    samples.end(1)
    assert str(samples) == "3 of 4 samples, all of them in the engines"
    samples.end(3)
    samples.begin(2)
    assert str(samples) == "2 of 2 samples, all of them in the engines"


def test_a_thread_looks_while_the_context_lasts() -> None:
    progress, messages = Progress(), list[str]()

    heard = threading.Event()

    def report(text: str) -> None:
        messages.append(text)
        heard.set()

    with WaitReporter(progress, report, after=0.01), progress.waiting_for("the start of ray"):
        assert heard.wait(60)
    assert messages[0].startswith("waiting for: the start of ray (for ")
