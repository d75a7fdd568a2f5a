"""Expected loss by failures, by hand and against runs that fail at random."""

from __future__ import annotations

from random import Random

import pytest

from skyrl.planning.failures import GPU_HOURS_BETWEEN_FAILURES, Interruptions


def test_without_failures_only_checkpoints_cost() -> None:
    never = Interruptions(between=1e12, restart=600, checkpoint=10)
    assert never.share_trained(90) == pytest.approx(0.9, abs=1e-6)


def test_failures_more_often_than_restarts_train_nothing() -> None:
    assert Interruptions(between=1, restart=600, checkpoint=10).share_trained(90) == 0


def test_llama_3_had_a_failure_every_three_hours_on_16384_gpus() -> None:
    assert GPU_HOURS_BETWEEN_FAILURES / 16_384 == pytest.approx(54 * 24 / 419, rel=0.01)


@pytest.mark.parametrize("checkpoint", [0.0, 5.0, 60.0])
@pytest.mark.parametrize("step", [1.0, 30.0, 300.0])
def test_no_other_interval_is_better_than_the_best(checkpoint: float, step: float) -> None:
    failures = Interruptions(between=3 * 3600, restart=300, checkpoint=checkpoint)
    best = failures.best_interval(step)
    share = failures.share_trained(best * step)
    assert share == max(failures.share_trained(steps * step) for steps in range(1, 3000))


def test_the_expectation_is_the_mean_of_runs_that_fail_at_random() -> None:
    """10,000 intervals of 1,000 s with a checkpoint of 50 s, a failure each 2,000 s, and restarts of 100 s."""
    failures, random = Interruptions(between=2000, restart=100, checkpoint=50), Random(1)
    clock, completed = 0.0, 0
    while completed < 10_000:
        until = random.expovariate(1 / 2000)
        if until >= 1050:
            clock, completed = clock + 1050, completed + 1
            continue
        clock += until
        while (until := random.expovariate(1 / 2000)) < 100:  # a restart may fail, too
            clock += until
        clock += 100
    assert failures.share_trained(1000) == pytest.approx(10_000 * 1000 / clock, rel=0.02)
