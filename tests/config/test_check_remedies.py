"""Remedies of problems: the nearest sizes that fit, the name that was meant, the cure of each case."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import compose
from skyrl.config.checks import batches, checks_in
from skyrl.config.loading.kinds import RL
from skyrl.errors import ConfigError
from tests.config.check_cases.settings import APART, CRITIC, gpus, resolved
from tests.config.leaves import RUNNABLE

NAMED: dict[str, Any] = {check.__name__: check for check in RL.checks}


@pytest.mark.parametrize(
    ("batch", "mini", "hint"),
    [
        (1024, 300, "nearest divisors: 256 and 512"),
        (12, 5, "nearest divisors: 4 and 6"),
        (7, 3, "nearest divisors: 1 and 7"),
        (6, 100, "nearest divisor: 6"),
        (10**12, 3, "nearest divisors: 2 and 4"),
        (10**15, 3, ""),
    ],
)
def test_the_nearest_divisors_are_told(batch: int, mini: int, hint: str) -> None:
    run = resolved({"trainer.train_batch_size": batch, "trainer.policy_mini_batch_size": mini})
    [problem] = NAMED["mini_batch_divides_batch"](run)
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        (
            {"trainer.train_batch_size": 120, "trainer.policy_mini_batch_size": 30, **gpus(8, "policy")},
            "150 samples (30 prompts x 5) cannot be split evenly across the policy's 8 data-parallel ranks",
            "nearest sizes that can: 24 and 40",
        ),
        (
            {"trainer.train_batch_size": 12, "trainer.policy_mini_batch_size": 6, **gpus(8, "policy")},
            "30 samples (6 prompts x 5) cannot be split evenly across the policy's 8 data-parallel ranks",
            "no size that divides trainer.train_batch_size = 12 can; nearest numbers of ranks that can share it "
            "evenly: 6 and 10",
        ),
    ],
)
def test_the_nearest_mini_batches_divide_the_batch_too(values: dict[str, Any], message: str, hint: str) -> None:
    [problem] = NAMED["mini_batch_divides_over_ranks"](resolved(values))
    assert (problem.message, problem.hint) == (message, hint)


def test_the_nearest_sizes_that_share_a_row_leave_room_for_the_other_size() -> None:
    shares = {"trainer.policy.sequence_parallel_size": 4, "trainer.policy.tensor_parallel_size": 4}
    [problem] = NAMED["ranks_form_whole_groups"](resolved({**gpus(12, "policy"), **shares}))
    assert problem.message == "sequence x tensor = 4 x 4 = 16 does not divide the policy's 12 ranks"
    assert problem.hint == "nearest divisor: 3"


def test_the_nearest_micro_batches_suit_policy_and_critic() -> None:
    values = {"trainer.critic_mini_batch_size": 128, "trainer.micro_train_batch_size_per_gpu": 256}
    [problem] = NAMED["micro_batch_divides_mini_batch"](resolved(CRITIC | values))
    assert problem.message == "256 samples do not divide the critic's mini-batch of 640 (128 prompts x 5)"
    assert problem.hint == "nearest divisors: 160 and 320"


def test_the_nearest_batches_suit_mini_batches_and_reference() -> None:
    [problem] = NAMED["scoring_shares_are_equal"](resolved(gpus(3, "ref")))
    assert problem.message == (
        "5120 samples (1024 prompts x 5) cannot be split evenly across the reference's 3 data-parallel ranks"
    )
    assert problem.hint == "nearest sizes that can, and that trainer.policy_mini_batch_size divides: 768 and 1536"


def test_a_mini_batch_that_does_not_divide_the_batch_is_told_once() -> None:
    values = {"trainer.policy_mini_batch_size": 300, **APART, **gpus(8, "policy"), **gpus(1, "ref")}
    problems = [problem for check in checks_in(batches) for problem in check(resolved(values))]
    assert [problem.path for problem in problems] == ["trainer.policy_mini_batch_size"]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("grop", "'grop' is unknown", "did you mean grpo?"),
        ("rlo", "'rlo' is unknown", "did you mean rloo?"),
        (
            "my_own",
            "'my_own' is unknown",
            "available: grpo, rloo, maxrl, reinforce++, reinforce++-baseline, gae, remax, opo, gpg, or module:name, "
            "file.py:name",
        ),
    ],
)
def test_an_unknown_estimator_is_told_what_there_is(name: str, message: str, hint: str) -> None:
    [problem] = NAMED["advantage_estimator_exists"](resolved({"trainer.algorithm.advantage_estimator": name}))
    assert (problem.message, problem.hint) == (message, hint)


@pytest.mark.parametrize(("turns", "hint"), [(1, "leave it out in single-turn runs"), (3, "raise it to the longest")])
def test_the_cure_of_a_short_input_depends_on_the_turns(turns: int, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([], {**RUNNABLE, "generator.max_input_length": 100, "generator.max_turns": turns})
    assert hint in next(
        problem.hint for problem in caught.value.problems if problem.path == "generator.max_input_length"
    )
