"""Metrics of ranks, merged: those of all tokens together, not averages of averages."""

from __future__ import annotations

import pytest
import torch

from skyrl.learners.rank_metrics import Moments, RankMetrics, merge_metrics


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0, -3.0])
    combined = Moments.from_tensor(values[:1]) + Moments.from_tensor(values[1:3]) + Moments.from_tensor(values[3:])
    assert (combined.count, combined.largest) == (5, 9.0)
    assert combined.mean == pytest.approx(2.6)
    assert combined.std == pytest.approx(values.std(correction=0).item())


def test_a_rank_without_tokens_changes_nothing() -> None:
    some = Moments.from_tensor(torch.tensor([1.0, 3.0]))
    assert some + Moments.from_tensor(torch.empty(0)) == some
    assert Moments() + some == some


def test_sums_add_up_and_means_weigh_tokens() -> None:
    def rank(loss: float, entropies: list[float]) -> RankMetrics:
        moments = {"policy_entropy": Moments.from_tensor(torch.tensor(entropies))}
        return RankMetrics(sums={"final_loss": loss}, moments=moments)

    metrics = merge_metrics([rank(1.0, [1.0, 1.0, 1.0]), rank(0.5, [5.0])]).metrics()
    assert metrics == {"final_loss": 1.5, "policy_entropy": 2.0}
