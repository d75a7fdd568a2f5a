"""Which answers of a group become pairs, and the derivative of their loss."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from skyrl.algorithms.ranked_pairs import Answers, Choice, OnlineDPOLoss, ranked_pairs, ties

REWARDS = torch.tensor([1.0, 3.0, 2.0, 3.0, 5.0, 5.0, 0.0, 9.0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
ABLE = torch.tensor([True] * 7 + [False])
"""Three groups: of four answers, two of which tie; of two equal ones; of one that may be in a pair."""


def chosen(choose: Choice, seed: int = 0) -> list[list[int]]:
    pairs: list[list[int]] = ranked_pairs(
        REWARDS, GROUPS, ABLE, choose=choose, keys=torch.arange(8), seed=seed
    ).tolist()
    return pairs


def test_the_best_answer_of_a_group_is_compared_with_its_worst() -> None:
    assert chosen("best_worst") == [[1, 0]]


def test_every_two_answers_of_a_group_whose_rewards_differ_are_pairs() -> None:
    assert chosen("all") == [[1, 0], [1, 2], [2, 0], [3, 0], [3, 2]]


def test_one_of_all_pairs_is_drawn_from_the_seed() -> None:
    drawn = {tuple(chosen("random", seed)[0]) for seed in range(40)}
    assert drawn == {tuple(pair) for pair in chosen("all")}
    assert chosen("random", 3) == chosen("random", 3)


def test_a_group_draws_the_same_pair_whatever_other_groups_there_are() -> None:
    first_pairs = ranked_pairs(REWARDS[:4], GROUPS[:4], ABLE[:4], choose="random", keys=torch.arange(4), seed=5)
    assert first_pairs.tolist() == chosen("random", 5)


def test_answers_of_equal_reward_are_counted_if_they_may_be_in_a_pair() -> None:
    assert ties(REWARDS, GROUPS, ABLE) == 2
    assert ties(torch.zeros(8), GROUPS, ABLE) == 6 + 1


@pytest.mark.parametrize("choose", get_args(Choice))
def test_groups_without_a_difference_make_no_pair(choose: Choice) -> None:
    none = ranked_pairs(torch.ones(8), GROUPS, ABLE, choose=choose, keys=torch.arange(8), seed=0)
    assert none.shape == (0, 2)


def test_the_derivative_of_dpo_is_beta_times_the_probability_of_the_other_order() -> None:
    """d/dx -log s(beta (x - y)) = -beta s(-beta (x - y)), of one pair out of two."""
    answers = Answers(logprobs=torch.tensor([-1.0, -3.0, -2.0]), ref_logprobs=torch.zeros(3), tokens=torch.ones(3))
    loss = OnlineDPOLoss(loss_type="sigmoid", beta=0.5, pairs="all")
    derivative, numbers = loss.derivative(answers, torch.tensor([[0, 1], [2, 1]]))
    share = torch.sigmoid(torch.tensor([-1.0, -0.5])) * 0.5 / 2
    torch.testing.assert_close(derivative, torch.stack([-share[0], share.sum(), -share[1]]))
    torch.testing.assert_close(numbers["margin"], torch.tensor([1.0, 0.5]))
