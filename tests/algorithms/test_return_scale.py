"""Running moments of returns: what a critic's targets are normalized by."""

from __future__ import annotations

import attrs
import pytest
import torch

from skyrl.algorithms.critic import ReturnScale, masked


def test_before_any_return_nothing_is_shifted_or_scaled() -> None:
    values = torch.tensor([[3.0, -2.0]])
    assert torch.equal(ReturnScale().normalized(values), values)
    assert torch.equal(ReturnScale().restored(values), values)


def test_the_first_returns_are_normalized_by_their_own_moments() -> None:
    scale = ReturnScale().updated(torch.tensor([10.0, 14.0]))  # mean 12, variance 4
    assert (scale.mean, scale.std) == pytest.approx((12.0, 2.0))
    torch.testing.assert_close(scale.normalized(torch.tensor([10.0, 14.0])), torch.tensor([-1.0, 1.0]))


def test_later_returns_count_a_hundredth_more_than_earlier_ones() -> None:
    scale = ReturnScale().updated(torch.tensor([0.0])).updated(torch.tensor([1.99]))
    assert scale.mean == pytest.approx(1.99 / 1.99)  # weights 0.99 and 1


def test_equal_returns_are_stretched_tenfold_at_most() -> None:
    assert ReturnScale().updated(torch.full((5,), 7.0)).std == pytest.approx(0.1)


@pytest.mark.parametrize("returns", [[], [1.0, torch.nan], [torch.inf]])
def test_returns_that_say_nothing_leave_the_moments_alone(returns: list[float]) -> None:
    scale = ReturnScale().updated(torch.tensor([1.0, 3.0]))
    assert scale.updated(torch.tensor(returns)) == scale


def test_restoring_undoes_normalizing() -> None:
    scale = ReturnScale().updated(torch.tensor([-5.0, 2.0, 40.0]))
    values = torch.tensor([[0.5, -7.0], [3.0, 100.0]])
    torch.testing.assert_close(scale.restored(scale.normalized(values)), values)


def test_a_scale_is_made_again_from_its_numbers() -> None:
    scale = ReturnScale().updated(torch.tensor([-5.0, 2.0]))
    assert ReturnScale.of(attrs.asdict(scale)) == scale


def test_values_are_kept_where_the_mask_is() -> None:
    output = masked(torch.tensor([[1.0, torch.nan]]), torch.tensor([[True, False]]))
    assert torch.equal(output, torch.tensor([[1.0, 0.0]]))
