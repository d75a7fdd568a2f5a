"""From rewards of environments to rewards that are trained on."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from skyrl.config import AlgorithmConfig, NormConfig, OverlongConfig, RewardShapingConfig
from skyrl.training.shaping import _last_selected, reward_shaping
from tests.training.batches import batch_of


def shaped(**settings: Any) -> list[list[float]]:
    """The rewards 1 and 0 of two answers of two tokens."""
    rewards, _ = reward_shaping(AlgorithmConfig(reward_shaping=RewardShapingConfig(**settings)))(batch_of())
    found: list[list[float]] = rewards.tolist()
    return found


def test_without_shaping_rewards_stay_where_they_are() -> None:
    assert shaped() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_the_penalty_comes_before_bias_and_scale_and_these_before_the_clip() -> None:
    overlong = OverlongConfig(buffer_len=2, max_len=3, penalty_factor=1.0)  # two tokens: half of it
    assert shaped(overlong=overlong, bias=1.0, scale=2.0) == [[0.0, 0.0, 3.0], [0.0, 0.0, 1.0]]
    assert shaped(overlong=overlong, bias=1.0, scale=2.0, clip=2.5) == [[0.0, 0.0, 2.5], [0.0, 0.0, 1.0]]


def test_normalization_comes_last() -> None:
    norm = NormConfig(mean_level="group")
    assert shaped(scale=8.0, clip=3.0, norm=norm) == [[0.0, 0.0, 1.5], [0.0, 0.0, -1.5]]


def test_an_answer_that_is_not_trained_on_is_in_no_statistic() -> None:
    batch = batch_of()
    mask = batch.loss_mask.clone()
    mask[1] = False  # cut off, and left out by generator.apply_overlong_filtering
    shaping = RewardShapingConfig(norm=NormConfig(mean_level="group", std_level="group"))
    rewards, _ = reward_shaping(AlgorithmConfig(reward_shaping=shaping))(attrs.evolve(batch, loss_mask=mask))
    assert rewards.sum(1).tolist() == pytest.approx([0.0, 0.0])  # alone it is its own mean; with the other, 0.71


def test_the_kl_penalty_is_taken_from_each_token_and_its_weight_is_kept() -> None:
    algorithm = AlgorithmConfig(use_kl_in_reward=True, use_kl_loss=False, kl_loss_coef=0.5, kl_estimator_type="k1")
    batch = batch_of()
    assert batch.rollout_logprobs is not None
    ref = batch.rollout_logprobs - 0.2  # k1 is 0.2 at every token
    shaping = reward_shaping(algorithm)
    rewards, said = shaping(batch.given(old_logprobs=batch.rollout_logprobs, ref_logprobs=ref))
    expected = torch.tensor([[0.0, -0.1, 0.9], [0.0, -0.1, -0.1]])
    torch.testing.assert_close(rewards, expected)
    assert said["loss/avg_kl"] == pytest.approx(0.2)
    assert shaping.state() == {"kl_coef": 0.5}


def test_a_reward_at_an_earlier_token_keeps_its_place_scaled() -> None:
    batch = attrs.evolve(batch_of(), rewards=torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    rewards, _ = reward_shaping(AlgorithmConfig(reward_shaping=RewardShapingConfig(bias=1.0, scale=3.0)))(batch)
    assert rewards.tolist() == [[0.0, 3.0, 9.0], [0.0, 0.0, 3.0]]  # (3 + 1) 3 in all, and (0 + 1) 3


def test_the_last_token_of_an_answer_is_the_last_that_is_trained_on_or_else_that_of_its_row() -> None:
    for first, last in (([0, 1, 0], 1), ([1, 0, 0], 0)):
        mask = torch.tensor([first, [0, 0, 0]]).bool()
        batch = attrs.evolve(batch_of(), loss_mask=mask, lengths=torch.tensor([3, 2]))
        assert _last_selected(batch).tolist() == [last, 1]
