"""Off-policy corrections, one at a time, on ratios that can be read off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyrl.algorithms.off_policy import Bounds, Corrected, OffPolicyCorrection, correct, sequence_ratios
from skyrl.config import OffPolicyCorrectionConfig
from skyrl.config.settings.losses import asks_for_correction
from skyrl.training.objective import off_policy_correction

RATIOS = torch.tensor([[0.5, 1.0, 2.0, 8.0], [1.0, 1.0, 4.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()


def corrected(correction: OffPolicyCorrection, ratios: Tensor = RATIOS, mask: Tensor = MASK) -> Corrected:
    """The engine's log-probabilities are -3 everywhere."""
    rollout = torch.full_like(ratios, -3.0)
    return correct(rollout + ratios.log(), rollout, mask, correction)


@pytest.mark.parametrize(
    ("low", "high", "left"),
    [
        (0.75, None, [[0, 1, 1, 1], [1, 1, 1, 0]]),
        (None, 3.0, [[1, 1, 1, 0], [1, 1, 0, 0]]),
        (0.75, 3.0, [[0, 1, 1, 0], [1, 1, 0, 0]]),
        (0.5, 2.0, [[1, 1, 1, 0], [1, 1, 0, 0]]),  # bounds belong to what is kept
    ],
)
def test_either_bound_of_the_token_mask_works_alone(
    low: float | None, high: float | None, left: list[list[int]]
) -> None:
    config = OffPolicyCorrectionConfig(token_mask_is_threshold_low=low, token_mask_is_threshold_high=high)
    result = corrected(off_policy_correction(config))
    assert asks_for_correction(config)
    assert result.mask.int().tolist() == left
    share = 1 - sum(map(sum, left)) / 7  # of the seven real tokens
    assert result.numbers["token_mask_ratio"].float().mean().item() == pytest.approx(share)


@pytest.mark.parametrize(("low", "high", "left"), [(None, 5.0, [0, 3]), (0.75, None, [0, 3]), (0.1, 9.0, [4, 3])])
def test_one_token_out_of_bounds_leaves_its_sequence_out(
    low: float | None, high: float | None, left: list[int]
) -> None:
    assert corrected(OffPolicyCorrection(outlier_token=Bounds(low=low, high=high))).mask.sum(1).tolist() == left


def test_a_token_is_weighed_by_its_ratio_up_to_the_cap() -> None:
    result = corrected(OffPolicyCorrection(tis="token", tis_cap=2.0))
    assert result.weights[MASK].tolist() == pytest.approx([0.5, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0])
    assert result.numbers["tis_token_clip_high_ratio"].tolist() == [False, False, False, True, False, False, True]


def test_a_sequence_is_weighed_by_the_product_of_its_ratios_up_to_the_cap() -> None:
    result = corrected(OffPolicyCorrection(tis="sequence", tis_cap=5.0))
    assert result.weights[:, 0].tolist() == pytest.approx([5.0, 4.0])  # 1/2 x 1 x 2 x 8 = 8, and 4


def test_sequences_are_masked_by_the_mean_or_by_the_product_of_their_ratios() -> None:
    geometric = OffPolicyCorrection(sequence_metric="geometric", sequence_mask=Bounds(high=1.6))
    assert corrected(geometric).mask.any(1).tolist() == [False, True]  # 8^(1/4) = 1.68, 4^(1/3) = 1.59
    product = OffPolicyCorrection(sequence_metric="product", sequence_mask=Bounds(low=5.0))
    result = corrected(product)
    assert result.mask.any(1).tolist() == [True, False]
    assert result.numbers["product_sequence_mask_under_low_ratio"].tolist() == [False, True]


def test_a_sequence_without_a_token_is_in_no_number() -> None:
    empty = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    ratios = torch.cat([RATIOS, torch.full((1, 4), 99.0)])
    correction = OffPolicyCorrection(
        outlier_token=Bounds(high=50.0), tis="sequence", sequence_metric="product", sequence_mask=Bounds(high=100.0)
    )
    result = corrected(correction, ratios, empty)
    sizes = {name: len(values) for name, values in result.numbers.items()}
    assert sizes.pop("is_ratio") == 7
    assert set(sizes.values()) == {2}
    assert result.weights[2].tolist() == [1.0] * 4  # the product of nothing


def test_nothing_wanted_is_nothing_done() -> None:
    assert not asks_for_correction(OffPolicyCorrectionConfig())
    assert not OffPolicyCorrection()


@pytest.mark.parametrize(("total", "clamped"), [(12.0, 12.0), (30.0, 20.0), (-12.0, -12.0), (-30.0, -20.0)])
def test_the_ratio_of_a_sequence_is_held_within_twenty_nats(total: float, clamped: float) -> None:
    log_ratio, mask = torch.tensor([[total / 2, total / 2, 99.0]]), torch.tensor([[True, True, False]])
    ratios = sequence_ratios(log_ratio, mask, "product")
    torch.testing.assert_close(ratios, torch.tensor([[clamped]]).exp())
    mean = sequence_ratios(2 * log_ratio, mask, "geometric")
    torch.testing.assert_close(mean, torch.tensor([[clamped]]).exp())
