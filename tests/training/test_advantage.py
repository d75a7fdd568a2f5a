"""From settings to the estimator of advantages and the targets of a critic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.algorithms.advantages import leave_one_out, relative_to_mean, rescaled_for_silent_groups
from skyrl.algorithms.estimators import GAE, OPO, Compared, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, NormConfig
from skyrl.training.advantage import Masked, Normalized, Standardized, advantage_estimator, critic_targets
from tests.training.batches import batch_of


def algorithm(name: str = "grpo", **settings: Any) -> AlgorithmConfig:
    return evolve(AlgorithmConfig(), advantage_estimator=name, gamma=0.9, lambd=0.8, **settings)


@pytest.mark.parametrize(
    ("name", "estimate"),
    [
        ("rloo", Compared(leave_one_out)),
        ("maxrl", Compared(relative_to_mean)),
        ("gpg", Compared(rescaled_for_silent_groups)),
        ("opo", OPO()),
        ("remax", ReMax()),
        ("reinforce++", ReinforcePlusPlus(gamma=0.9)),
        ("reinforce++-baseline", ReinforcePlusPlusBaseline()),
        ("gae", GAE(gamma=0.9, lambd=0.8)),
    ],
)
def test_a_name_is_an_estimator_with_its_settings(name: str, estimate: Any) -> None:
    assert advantage_estimator(algorithm(name)) == Masked(estimate=estimate)


@pytest.mark.parametrize(("by_std", "good"), [(True, 0.5 / (0.5**0.5 + 1e-6)), (False, 0.5)])
def test_grpo_divides_by_the_deviation_where_it_is_asked_to(by_std: bool, good: float) -> None:
    advantages = advantage_estimator(algorithm(grpo_norm_by_std=by_std))(batch_of())  # rewards 1 and 0
    torch.testing.assert_close(advantages, torch.tensor([[0.0, good, good], [0.0, -good, -good]]))


def test_advantages_that_are_not_whitened_are_plain_returns_or_distances_from_values() -> None:
    batch = evolve(batch_of(), values=torch.tensor([[9.0, 0.5, 0.25], [9.0, 0.0, 0.0]]))  # rewards 1 and 0
    returns = advantage_estimator(algorithm("reinforce++", whiten_advantages=False))(batch)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.9, 1.0], [0.0, 0.0, 0.0]]))
    # 1 - 0.25 at the last token; 0.9 x 0.25 - 0.5 + 0.9 x 0.8 x 0.75 before it
    distances = advantage_estimator(algorithm("gae", whiten_advantages=False))(batch)
    torch.testing.assert_close(distances, torch.tensor([[0.0, 0.265, 0.75], [0.0, 0.0, 0.0]]))


def ones(batch: TrainingBatch) -> Tensor:
    return torch.tensor([[5.0, 1.0, 3.0], [5.0, 7.0, 9.0]])


def test_advantages_are_zero_outside_the_mask_whatever_was_estimated() -> None:
    assert Masked(estimate=ones)(batch_of()).tolist() == [[0.0, 1.0, 3.0], [0.0, 7.0, 9.0]]


def test_advantages_are_standardized_or_shifted_over_tokens() -> None:
    root = 10**0.5  # of 1, 3, 7 and 9: mean 5, squared distances 16, 4, 4, 16
    advantages = Standardized(estimate=ones)(batch_of())
    torch.testing.assert_close(advantages, torch.tensor([[0.0, -4 / root, -2 / root], [0.0, 2 / root, 4 / root]]))
    shifted = Normalized(estimate=ones, norm=NormConfig(mean_level="batch"))(batch_of())
    assert shifted.tolist() == [[0.0, -4.0, -2.0], [0.0, 2.0, 4.0]]
    kind = type(advantage_estimator(algorithm(advantage_batch_normalize=True)))
    assert kind is Standardized
    assert type(advantage_estimator(algorithm(advantage_norm=NormConfig(mean_level="batch")))) is Normalized


@pytest.mark.parametrize(("name", "first"), [("gae", 0.9 * (0.8 * 1 + 0.2 * 0.5)), ("grpo", 0.9)])
def test_a_critic_learns_lambda_returns_where_the_estimator_has_a_lambda_and_plain_ones_elsewhere(
    name: str, first: float
) -> None:
    batch = evolve(batch_of(), values=torch.full((2, 3), 0.5))
    targets = critic_targets(algorithm(name))(batch)  # rewards 0 and 1 at the two tokens of the first answer
    assert targets[0].tolist() == pytest.approx([0.0, first, 1.0])
