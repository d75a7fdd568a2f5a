"""What is done to rewards before they are compared, by hand; AReaL's figures where it has printed some."""

from __future__ import annotations

import pytest
import torch

from skyrl.algorithms.returns import generalized_advantages
from skyrl.algorithms.rewards import Level, less_the_divergence, normalize, overlong_penalty, scaled

LENGTHS = torch.tensor([10, 3584, 3840, 4096, 5000])  # of at most 4096, the last 512 of which cost


def test_the_overlong_penalty_of_dapo_falls_to_its_floor_at_the_limit() -> None:
    penalty = overlong_penalty(LENGTHS, longest=4096, buffer=512, factor=1.0, floor=True)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_the_overlong_penalty_of_areal_goes_on_along_its_line() -> None:
    penalty = overlong_penalty(LENGTHS, longest=4096, buffer=512, factor=1.0, floor=False)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -(5000 - 3584) / 512])  # -2.766


def test_the_factor_is_the_penalty_at_the_limit() -> None:
    penalty = overlong_penalty(torch.tensor([12, 16, 20]), longest=16, buffer=8, factor=3.0, floor=True)
    assert penalty.tolist() == [-1.5, -3.0, -3.0]


def test_rewards_are_shifted_then_scaled_then_held() -> None:
    rewards = torch.tensor([-4.0, 0.0, 1.0])
    assert scaled(rewards, bias=-0.5, scale=2.0, clip=None).tolist() == [-9.0, -1.0, 1.0]
    assert scaled(rewards, bias=-0.5, scale=2.0, clip=1.5).tolist() == [-1.5, -1.0, 1.0]


# Normalization

REWARDS = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0)
GROUPS = (5, 5, 5, 5, 2, 2, 2, 2)  # means 1/2 and 3/4; of the batch 5/8


def normalized(
    values: tuple[float, ...],
    groups: tuple[int, ...],
    mean: Level | None,
    std: Level | None,
    *,
    leave_one_out: bool = False,
    unbiased: bool = False,
    mask: tuple[bool, ...] | None = None,
) -> list[float]:
    rewards = normalize(
        torch.tensor(values),
        torch.tensor(groups),
        torch.tensor(mask or (True,) * len(values)),
        mean_level=mean,
        std_level=std,
        leave_one_out=leave_one_out,
        unbiased=unbiased,
        eps=1e-5,
    )
    return rewards.tolist()


@pytest.mark.parametrize(
    ("mean", "std", "right", "wrong"),
    [
        ("batch", "batch", (0.77458, 0.77458), (-1.29097, -1.29097)),  # 3/8 and -5/8 over sqrt(15)/8
        ("group", "group", (0.99998, 0.57734), (-0.99998, -1.73201)),  # over 1/2, and over sqrt(3)/4
        ("group", "batch", (1.06902, 0.53451), (-1.06902, -1.60353)),  # over sqrt((4/4 + 3/16 + 9/16) / 8)
        ("group", None, (0.5, 0.25), (-0.5, -0.75)),
        (None, None, (1.0, 1.0), (0.0, 0.0)),
        ("batch", None, (0.375, 0.375), (-0.625, -0.625)),
        (None, "batch", (1.26491, 1.26491), (0.0, 0.0)),  # sqrt(5/8): without a mean, the root of the mean square
    ],
    ids=str,
)
def test_each_row_of_areals_normalization(
    mean: Level | None, std: Level | None, right: tuple[float, float], wrong: tuple[float, float]
) -> None:
    """`right` and `wrong`: what rewards 1 and 0 become in the first group and in the second."""
    expected = [(right if reward else wrong)[index // 4] for index, reward in enumerate(REWARDS)]
    assert normalized(REWARDS, GROUPS, mean, std) == pytest.approx(expected, abs=2e-5)


def test_the_mean_of_the_others_makes_it_rloo() -> None:
    rewards = normalized(REWARDS[:4], GROUPS[:4], "group", None, leave_one_out=True)
    assert rewards == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])  # 1 - 1/3 and 0 - 2/3


def test_a_leave_one_out_mean_has_its_own_deviation() -> None:
    rewards = normalized(REWARDS[:4], GROUPS[:4], "group", "group", leave_one_out=True)
    assert rewards == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=2e-5)  # the root of the mean of (2/3)^2


def test_the_unbiased_deviation_divides_by_one_less() -> None:
    rewards = normalized(REWARDS[:4], GROUPS[:4], "group", "group", unbiased=True)
    assert rewards == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-4)  # 1/2 over sqrt(1/3)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_group_of_one_is_its_own_mean(leave_one_out: bool) -> None:
    assert normalized((3.0, 1.0, 2.0), (0, 1, 1), "group", "group", leave_one_out=leave_one_out, unbiased=True)[0] == 0


def test_a_group_of_one_without_a_mean_is_divided_by_one() -> None:
    assert normalized((3.0,), (0,), None, "group", unbiased=True) == pytest.approx([3.0], rel=2e-5)


@pytest.mark.parametrize("std", [None, "group", "batch"])
def test_equal_rewards_become_exactly_nothing(std: Level | None) -> None:
    assert normalized((0.1,) * 6, (0, 0, 0, 1, 1, 1), "group", std, unbiased=True) == [0.0] * 6


def test_what_is_left_out_is_in_no_mean_and_becomes_nothing() -> None:
    values, mask = (1.0, 0.0, float("nan"), 7.0), (True, True, False, False)
    assert normalized(values, (0, 0, 0, 1), "group", None, mask=mask) == [0.5, -0.5, 0.0, 0.0]
    assert normalized((1.0, 2.0), (0, 0), "group", "batch", mask=(False, False)) == [0.0, 0.0]


def test_tokens_of_a_long_answer_weigh_more_in_the_mean() -> None:
    rewards = normalized((3.0, 0.0, 0.0), (0, 0, 0), "group", None)  # one token of one answer, two of the other
    assert rewards == [2.0, -1.0, -1.0]


def test_a_group_of_two_has_the_deviation_of_two() -> None:
    biased = normalized((3.0, 1.0), (0, 0), "group", "group")  # +-1 over sqrt((1 + 1) / 2)
    assert biased == pytest.approx([1.0, -1.0], abs=2e-5)
    unbiased = normalized((3.0, 1.0), (0, 0), "group", "group", unbiased=True)
    assert unbiased == pytest.approx([0.70711, -0.70711], abs=2e-5)  # +-1 over sqrt(2 / 1)


def test_in_a_group_of_two_the_mean_of_the_others_is_the_other() -> None:
    assert normalized((3.0, 1.0, 4.0), (0, 0, 1), "group", None, leave_one_out=True) == [2.0, -2.0, 0.0]


# The KL penalty in the reward


def test_the_divergence_is_taken_off_at_the_selected_tokens_alone() -> None:
    rewards, divergence = torch.tensor([[0.0, 1.0]]), torch.tensor([[float("nan"), 0.2]])
    mask = torch.tensor([[False, True]])
    torch.testing.assert_close(less_the_divergence(rewards, divergence, mask, weight=0.5), torch.tensor([[0.0, 0.9]]))


@pytest.mark.parametrize("weight", [0.0, -0.5])
def test_a_weight_of_zero_or_less_takes_nothing_off(weight: float) -> None:
    rewards, mask = torch.tensor([[1.0]]), torch.tensor([[True]])
    assert less_the_divergence(rewards, torch.tensor([[0.2]]), mask, weight=weight).item() == 1.0


def test_a_reward_outside_the_mask_counts_for_the_token_before_it() -> None:
    rewards, mask = torch.tensor([[4.0, 2.0, 0.0, 1.0]]), torch.tensor([[0, 1, 1, 0]]).bool()
    advantages, returns = generalized_advantages(rewards, torch.zeros(1, 4), mask, gamma=0.5, lambd=1.0)
    assert returns.tolist() == [[0.0, 2.5, 1.0, 0.0]]  # 2 + 1/2, and the 1 that comes after the last token
    assert torch.equal(advantages, returns)
