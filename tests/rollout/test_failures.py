from __future__ import annotations

import pytest

from skyrl.errors import RewardError
from skyrl.rollout.attempts import FailureTally
from skyrl.trajectory import Failure

FAILURE = Failure(kind="raised", reason="the grader broke")


def test_failures_are_too_many_by_the_samples_of_a_batch() -> None:
    """A fifth of 10 is 2; the third is too many."""
    tally = FailureTally(10, 0.2)
    tally.begins(10)
    tally.count(FAILURE)
    tally.count(FAILURE)
    with pytest.raises(RewardError, match="environments failed 3 times among 10 samples"):
        tally.count(FAILURE)


def test_as_many_failures_as_one_sample_may_have_stop_no_run_however_small_its_batch() -> None:
    tally = FailureTally(1, 0.2, attempts=3)
    for _ in range(3):
        tally.count(FAILURE)
    with pytest.raises(RewardError, match="environments failed 4 times among 1 samples"):
        tally.count(FAILURE)


def test_a_share_of_nothing_stops_at_the_first_failure() -> None:
    with pytest.raises(RewardError, match="environments failed 1 times among 100 samples"):
        FailureTally(100, 0.0, attempts=3).count(FAILURE)


def test_where_five_batches_are_drawn_at_the_same_time_failures_may_be_five_times_as_many() -> None:
    """40 of 50 samples still run when the next batch begins: a fifth of 40 is 8."""
    tally = FailureTally(10, 0.2)
    tally.begins(50)
    for _ in range(10):
        tally.count(FAILURE)
    tally.ends(10)
    tally.reset()
    for _ in range(8):
        tally.count(FAILURE)
    with pytest.raises(RewardError, match="9 times among 40 samples"):
        tally.count(FAILURE)
