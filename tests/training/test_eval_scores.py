from __future__ import annotations

from itertools import combinations
from math import sqrt
from random import Random
from statistics import fmean, stdev

import pytest

from skyrl.training.evaluation import clustered_error, majority, mean_interval, pass_at_k, scores, share_interval
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


def group(*samples: tuple[str | None, float], filled: int = 0) -> TrajectoryGroup:
    """Samples with an answer and a reward each; the last `filled` of them stand in for others."""
    prompt = Prompt(id="p", messages=(), token_ids=(1,), env_class="gsm8k")
    rows = [
        Trajectory(
            prompt_id="p",
            sample_index=index,
            prompt_ids=(1,),
            response_ids=(2,),
            loss_mask=(1,),
            rollout_logprobs=(0.0,),
            weight_versions=(0,),
            rewards=(TurnReward(token=0, reward=reward),),
            stop_reason="stop",
            answer=answer,
            filled=index >= len(samples) - filled,
        )
        for index, (answer, reward) in enumerate(samples)
    ]
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(rows))


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        outcomes = [index < right for index in range(samples)]
        for k in range(1, samples + 1):
            brute = fmean(any(chosen) for chosen in combinations(outcomes, k))
            assert pass_at_k(samples, right, k) == pytest.approx(brute, abs=1e-12)


def test_the_commonest_answer_is_judged_and_samples_without_one_do_not_vote() -> None:
    assert majority([("7", 1.0), ("7", 1.0), ("8", 0.0), (None, 0.0)]) == 1.0
    assert majority([("7", 1.0), ("8", 0.0), ("8", 0.0)]) == 0.0
    assert majority([("7", 1.0), ("8", 0.0)]) == 0.5  # equally common
    assert majority([(None, 0.0)]) == 0.0


def test_errors_of_single_samples_are_the_usual_ones_and_copies_of_a_sample_do_not_lower_them() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    usual = stdev(values) / sqrt(5)
    assert clustered_error([[value] for value in values]) == pytest.approx(usual)
    assert clustered_error([[value] * 8 for value in values]) == pytest.approx(usual)


def test_an_evaluation_of_two_prompts_by_hand() -> None:
    """Rewards are positive for 2 of 4 samples, and for 0 of 4. pass@2 of the first: 1 - C(2, 2) / C(4, 2) = 5 / 6."""
    metrics = scores([group(("7", 1.0), ("8", 0.0), ("8", 0.0), (None, 0.2)), group(*[("1", 0.0)] * 4)], 4)
    assert metrics == pytest.approx(
        {
            "avg_score": 0.15,
            "avg_score_stderr": 0.15,  # means 0.3 and 0: their standard deviation over sqrt(2)
            "accuracy": 0.125,
            "accuracy_stderr": 0.125,
            "mean_positive_reward": 0.15,
            "best_at_4": 0.5,
            "pass_at_1": 0.25,
            "pass_at_1_stderr": 0.25,
            "pass_at_2": 5 / 12,
            "pass_at_2_stderr": 5 / 12,
            "pass_at_4": 0.5,
            "pass_at_4_stderr": 0.5,
            "maj_at_4": 0.0,
            "maj_at_4_stderr": 0.0,
        }
    )


def test_one_sample_of_one_prompt_has_no_error_and_no_votes_where_its_task_reads_no_answers() -> None:
    metrics = scores([group((None, 1.0))], 1)
    assert metrics == dict.fromkeys(("avg_score", "accuracy", "mean_positive_reward", "best_at_1", "pass_at_1"), 1.0)


def test_a_sample_that_stands_in_for_another_counts_once() -> None:
    metrics = scores([group(("7", 1.0), ("8", 0.0), ("7", 1.0), filled=1)], 3)
    assert (metrics["avg_score"], metrics["maj_at_3"]) == (0.5, 0.5)
    assert "pass_at_3" not in metrics


def test_the_share_of_a_single_prompt_counts_as_one_sample() -> None:
    """Wilson with n = 1 and p = 1/2: 1/2 +- 1/2 z / sqrt(1 + z^2) = 1/2 +- 0.445."""
    assert share_interval([[1.0, 0.0]]) == pytest.approx((0.0546, 0.9454), abs=1e-4)
    assert share_interval([[1.0], [0.0]]) == pytest.approx((0.0546, 0.9454), abs=1e-4), "error 1/2: one sample, too"


def test_bounds_of_a_mean_are_percentiles_of_resampled_prompts() -> None:
    """Of 11 prompts 3 pay 1: a resample pays nothing with (8 / 11)^11 = 3.0 %, which is more than 2.5 %."""
    assert mean_interval([[2.0, 2.0], [2.0]]) == (2.0, 2.0)
    assert mean_interval([[0.0]] * 8 + [[1.0]] * 3)[0] == 0.0
    assert mean_interval([[1.0]] * 8 + [[0.0]] * 3)[1] == 1.0
    assert mean_interval([[1.0]] * 4 + [[0.0]] * 3)[1] < 1.0  # all pay 1 with (4 / 7)^7 = 2.0 %
    assert mean_interval([[0.0]] * 9 + [[1.0]] * 1)[1] < mean_interval([[0.0]] * 8 + [[1.0]] * 3)[1] < 0.7


def test_an_interval_of_a_share_is_wilsons_where_each_prompt_has_one_sample() -> None:
    """8 of 10 by hand: error sqrt(0.16 / 9), so 9 effective samples; Wilson's bounds for p = 0.8 and n = 9."""
    low, high = share_interval([[1.0]] * 8 + [[0.0]] * 2)
    z = 1.959963984540054
    center, half = (0.8 + z**2 / 18) / (1 + z**2 / 9), z / (1 + z**2 / 9) * sqrt(0.16 / 9 + z**2 / 324)
    assert (low, high) == pytest.approx((center - half, center + half))
    assert share_interval([[1.0, 1.0]] * 8 + [[0.0, 0.0]] * 2) == pytest.approx((low, high)), "copies add nothing"


def test_a_perfect_score_is_not_certain() -> None:
    low, high = share_interval([[1.0]] * 20)
    assert (round(low, 3), high) == (0.839, 1.0)  # Wilson: n / (n + z^2)
    assert share_interval([[0.0]] * 20) == pytest.approx((0.0, 1 - low))


@pytest.mark.long
def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """400 evaluations of 40 prompts, 4 samples each, of which a prompt's own difficulty decides: truth is 0.6 and 2."""
    random, covered = Random(0), [0, 0]
    for _ in range(400):
        chances = [random.betavariate(1.2, 0.8) for _ in range(40)]
        right = [[float(random.random() < chance) for _ in range(4)] for chance in chances]
        rewards = [[random.gauss(center, 1) for _ in range(4)] for center in (random.gauss(2, 1) for _ in range(40))]
        for index, (truth, (low, high)) in enumerate([(0.6, share_interval(right)), (2.0, mean_interval(rewards))]):
            covered[index] += low <= truth <= high
    assert all(0.92 <= count / 400 <= 0.98 for count in covered), covered
