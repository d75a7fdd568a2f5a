from __future__ import annotations

import torch

from skyrl.algorithms.advantages import (
    group_relative,
    length_weighted,
    less_the_group_mean,
    rescaled_for_silent_groups,
)


def test_an_answer_is_measured_against_the_mean_of_its_group() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 5.0, 3.0]), torch.tensor([0, 0, 1, 1])
    advantages = group_relative(scores, groups, normalize_by_std=False)
    torch.testing.assert_close(advantages, torch.tensor([0.5, -0.5, 1.0, -1.0]))


def test_dividing_by_the_standard_deviation_makes_groups_of_different_scale_alike() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 500.0, 300.0]), torch.tensor([0, 0, 1, 1])
    advantages = group_relative(scores, groups, normalize_by_std=True)
    half = 0.5**0.5  # (1 - 0.5) / sqrt(0.5)
    torch.testing.assert_close(advantages, torch.tensor([half, -half, half, -half]), atol=1e-5, rtol=0)


def test_a_group_of_equal_scores_gets_exactly_nothing_however_it_rounds() -> None:
    scores, groups = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long)
    assert group_relative(scores, groups, normalize_by_std=True).tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_keeps_its_score() -> None:
    advantages = group_relative(torch.tensor([2.0]), torch.tensor([7]), normalize_by_std=True)
    torch.testing.assert_close(advantages, torch.tensor([2.0]), atol=1e-5, rtol=0)


def test_groups_are_told_by_their_number_and_not_by_where_they_stand() -> None:
    scores, groups = torch.tensor([1.0, 5.0, 0.0, 3.0]), torch.tensor([4, 9, 4, 9])
    advantages = group_relative(scores, groups, normalize_by_std=False)
    torch.testing.assert_close(advantages, torch.tensor([0.5, 1.0, -0.5, -1.0]))


def test_less_the_group_mean_does_not_divide_by_the_deviation() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 5.0, 3.0]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(less_the_group_mean(scores, groups), torch.tensor([0.5, -0.5, 1.0, -1.0]))


def test_the_baseline_weighted_by_length_of_groups_with_few_tokens_or_one_score() -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    scores = torch.tensor([2.0, 0.0, 2.0, 0.0, 0.1, 0.1, 0.1])
    lengths = torch.tensor([1, 0, 0, 0, 3, 5, 7])
    # one token, that of score 2; no token at all; equal scores, whose weighted mean rounds to something else
    assert length_weighted(scores, groups, lengths).tolist() == [0.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_batch_of_one_lone_answer_is_not_rescaled() -> None:
    assert rescaled_for_silent_groups(torch.tensor([3.0]), torch.tensor([0])).tolist() == [3.0]
