"""Counts of samples that are being drawn."""

from __future__ import annotations

from skyrl.rollout.env_calls import SamplesInFlight
from skyrl.rollout.threads import ThreadCall


def test_samples_that_are_finished_are_taken_off_and_calls_of_environments_are_timed() -> None:
    now = [100.0]
    samples = SamplesInFlight(lambda: now[0])
    assert str(samples) == ""
    samples.begin(8)
    samples.end(3)
    assert str(samples) == "5 of 8 samples, all of them in the engines"
    first, second, waits = (ThreadCall(lambda: None) for _ in range(3))
    first.start_time = 100.0
    with samples.in_environment(first), samples.in_environment(waits):
        now[0] = second.start_time = 112.0
        with samples.in_environment(second):
            assert str(samples) == "5 of 8 samples, 2 calls of environments, the oldest for 12 s"
        assert str(samples) == "5 of 8 samples, 1 call of environments, the oldest for 12 s"
    samples.begin(2)
    assert str(samples) == "7 of 10 samples, all of them in the engines"
    samples.end(7)
    assert str(samples) == ""
    samples.begin(4)  # what is finished is forgotten
    assert str(samples) == "4 of 4 samples, all of them in the engines"
