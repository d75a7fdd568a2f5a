from __future__ import annotations

from itertools import combinations
from math import sqrt
from statistics import fmean, stdev

import pytest

from skyrl.training.eval_scores import clustered_error, majority, pass_at_k, scores
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


def group(*samples: tuple[str | None, float], filled: int = 0) -> TrajectoryGroup:
    """Samples with an answer and a reward each; the last `filled` of them stand in for others."""
    prompt = Prompt(id="p", messages=(), token_ids=(1,), env_class="gsm8k")
    rows = [
        Trajectory(
            prompt_id="p",
            sample_index=place,
            prompt_ids=(1,),
            response_ids=(2,),
            loss_mask=(1,),
            rollout_logprobs=(0.0,),
            weight_versions=(0,),
            rewards=(TurnReward(token=0, reward=reward),),
            stop_reason="stop",
            answer=answer,
            filled=place >= len(samples) - filled,
        )
        for place, (answer, reward) in enumerate(samples)
    ]
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(rows))


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        outcomes = [place < right for place in range(samples)]
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
    found = scores([group(("7", 1.0), ("8", 0.0), ("8", 0.0), (None, 0.2)), group(*[("1", 0.0)] * 4)], 4)
    assert found == pytest.approx(
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
    found = scores([group((None, 1.0))], 1)
    assert found == dict.fromkeys(("avg_score", "accuracy", "mean_positive_reward", "best_at_1", "pass_at_1"), 1.0)


def test_a_sample_that_stands_in_for_another_counts_once() -> None:
    found = scores([group(("7", 1.0), ("8", 0.0), ("7", 1.0), filled=1)], 3)
    assert (found["avg_score"], found["maj_at_3"]) == (0.5, 0.5)
    assert "pass_at_3" not in found
