"""Which losses look at the policy before the batch: the configuration's answer beside what the losses do."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from skyrl.config import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.config.derive.sizes import scores_old_logprobs
from skyrl.config.settings.losses import POLICY_LOSSES, CISPOConfig
from skyrl.training.objective import policy_objective
from skyrl.training.trainer import _mean_ratio
from tests.training.batches import batch_of


@pytest.mark.parametrize(
    "algorithm",
    [
        *(AlgorithmConfig(policy_loss_type=name) for name in POLICY_LOSSES),
        AlgorithmConfig(policy_loss_type="cispo", cispo=CISPOConfig(cispo_anchor="rollout")),
        AlgorithmConfig(
            policy_loss_type="dppo", off_policy_correction=OffPolicyCorrectionConfig(token_mask_is_threshold_high=1.5)
        ),
    ],
    ids=lambda algorithm: algorithm.policy_loss_type,
)
def test_old_logprobs_are_asked_for_exactly_where_they_change_the_loss(algorithm: AlgorithmConfig) -> None:
    objective = policy_objective(algorithm)
    batch = objective.weigh(batch_of().with_fields(ref_logprobs=torch.zeros(2, 3)))
    new = torch.tensor([[0.0, -0.7, -0.9], [0.0, -0.4, -1.1]])
    losses = [
        objective(new, batch.with_fields(old_logprobs=old))[0].item()
        for old in (new - 0.1, new - torch.tensor([[0.0, 0.3, 2.5], [0.0, -1.2, 0.5]]))
    ]
    assert (losses[0] != losses[1]) == scores_old_logprobs(algorithm, optimizer_steps=2)


@pytest.mark.parametrize("source", ["engine", "interpolated"])
def test_the_engines_own_log_probabilities_need_no_pass(source: Literal["engine", "interpolated"]) -> None:
    algorithm = AlgorithmConfig(old_logprobs=source, use_kl_in_reward=True, use_kl_loss=False)
    assert not scores_old_logprobs(algorithm, optimizer_steps=4)


def test_one_update_compares_with_nothing_older_than_itself() -> None:
    assert not scores_old_logprobs(AlgorithmConfig(), optimizer_steps=1)


def test_a_kl_term_in_the_reward_is_taken_before_the_first_update() -> None:
    assert scores_old_logprobs(
        AlgorithmConfig(use_kl_in_reward=True, use_kl_loss=False, policy_loss_type="dppo"), optimizer_steps=1
    )


async def test_the_mean_ratio_is_one_where_old_log_probabilities_are_the_policys_own() -> None:
    nobody: Any = None  # is asked to score
    assert await _mean_ratio(nobody, batch_of()) == 1.0
