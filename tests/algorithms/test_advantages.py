from __future__ import annotations

import torch

from skyrl.algorithms.advantages import group_relative


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
