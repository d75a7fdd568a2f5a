"""Statistics over a mask, by hand: what they are, and that equal values have no spread whatever their size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from skyrl.algorithms.estimators import ReinforcePlusPlusBaseline
from skyrl.algorithms.masked import masked_mean, masked_var, standardize, whiten
from skyrl.batch import TrainingBatch

NAN = float("nan")


@pytest.mark.parametrize("shift", [whiten, standardize])
@pytest.mark.parametrize("value", [0.7, 100.3, 1000.1, 1e30, -1e-30])
def test_equal_values_become_exactly_nothing(shift: Callable[[Tensor, Tensor], Tensor], value: float) -> None:
    values = torch.full((512, 512), value)
    assert not shift(values, torch.ones(512, 512, dtype=torch.bool)).any()


def test_equal_values_have_no_variance() -> None:
    assert masked_var(torch.full((512, 512), 1000.1), torch.ones(512, 512, dtype=torch.bool)) == 0


def test_reinforce_plus_plus_baseline_learns_nothing_from_equal_scores_of_lone_answers() -> None:
    batch = TrainingBatch(
        input_ids=torch.zeros(512, 512, dtype=torch.long),
        lengths=torch.full((512,), 512),
        loss_mask=torch.ones(512, 512, dtype=torch.bool),
        rollout_logprobs=torch.zeros(512, 512),
        rewards=torch.nn.functional.pad(torch.full((512, 1), 1000.1), (511, 0)),
        groups=torch.arange(512),  # one answer to each prompt: it keeps its score
    )
    assert not ReinforcePlusPlusBaseline()(batch).any()


def test_standardizing_divides_by_the_root_of_the_biased_variance() -> None:
    values = torch.tensor([1.0, 2.0, NAN, 3.0, 6.0])  # mean 3, squared distances 4, 1, 0, 9: variance 14 / 4
    standardized = standardize(values, torch.tensor([1, 1, 0, 1, 1]).bool())
    root = 3.5**0.5
    torch.testing.assert_close(standardized, torch.tensor([-2 / root, -1 / root, 0.0, 0.0, 3 / root]))


def test_whitening_divides_by_the_root_of_the_unbiased_variance() -> None:
    values = torch.tensor([1.0, 2.0, NAN, 3.0, 6.0])
    whitened = whiten(values, torch.tensor([1, 1, 0, 1, 1]).bool())
    root = (14 / 3) ** 0.5
    torch.testing.assert_close(whitened, torch.tensor([-2 / root, -1 / root, 0.0, 0.0, 3 / root]))


def test_a_spread_below_the_bound_of_either_is_not_blown_up_to_one() -> None:
    values, mask = torch.tensor([-1e-5, 1e-5], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    assert standardize(values, mask).tolist() == pytest.approx([-0.1, 0.1])  # 1e-5 / sqrt(1e-8)
    assert whiten(values, mask).tolist() == pytest.approx([-0.0990148, 0.0990148])  # 1e-5 / sqrt(2e-10 + 1e-8)


@pytest.mark.parametrize("shift", [whiten, standardize])
@pytest.mark.parametrize("mask", [(False, False), (False, True)])
def test_fewer_than_two_values_become_nothing(
    shift: Callable[[Tensor, Tensor], Tensor], mask: tuple[bool, ...]
) -> None:
    shifted = shift(torch.tensor([NAN, 5.0]), torch.tensor(mask))
    assert (shifted.tolist(), shifted.dtype) == ([0.0, 0.0], torch.float32)


def test_the_mean_of_one_value_is_that_value_and_of_none_is_zero() -> None:
    values, mask = torch.tensor([[4.0, NAN], [NAN, NAN], [1.0, 2.0]]), torch.tensor([[1, 0], [0, 0], [1, 1]]).bool()
    assert masked_mean(values, mask, dim=1).tolist() == [4.0, 0.0, 1.5]
    assert masked_mean(values[:1], mask[:1]) == 4.0
    assert masked_mean(values[1:2], mask[1:2]) == 0.0


def test_the_variance_of_one_value_is_zero_and_of_two_half_their_squared_distance() -> None:
    mask = torch.tensor([True, True, False])
    assert masked_var(torch.tensor([1.0, 4.0, NAN]), mask).item() == pytest.approx(4.5)
    assert masked_var(torch.tensor([4.0, NAN]), torch.tensor([True, False])) == 0
