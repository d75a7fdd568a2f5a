"""From rewards of environments to rewards that are trained on."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import torch

from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, KLCtrlConfig, NormConfig, OverlongConfig, RewardShapingConfig
from skyrl.training.advantage import reward_shaping
from skyrl.training.collate import collate
from skyrl.trajectory import Prompt, TokenRow, Trajectory, TrajectoryGroup, TurnReward
from tests.training.batches import batch_of


def shaped(**settings: Any) -> list[list[float]]:
    """The rewards 1 and 0 of two answers of two tokens."""
    rewards, _ = reward_shaping(AlgorithmConfig(reward_shaping=RewardShapingConfig(**settings)))(batch_of())
    values: list[list[float]] = rewards.tolist()
    return values


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
    rewards, metrics = shaping(batch.with_fields(old_logprobs=batch.rollout_logprobs, ref_logprobs=ref))
    expected = torch.tensor([[0.0, -0.1, 0.9], [0.0, -0.1, -0.1]])
    torch.testing.assert_close(rewards, expected)
    assert metrics["loss/avg_kl"] == pytest.approx(0.2)
    assert shaping.state() == {"kl_coef": 0.5}


def test_the_adaptive_weight_follows_the_mean_over_answers_and_their_number() -> None:
    """Two answers, of two tokens with k1 = 0.4 and 0.2 and of one with 0.6: the mean of 0.3 and 0.6, not of tokens."""
    control = KLCtrlConfig(type="adaptive", kl_target=0.5, horizon=10)
    algorithm = AlgorithmConfig(
        use_kl_in_reward=True, use_kl_loss=False, kl_loss_coef=0.5, kl_estimator_type="k1", kl_ctrl=control
    )
    batch = attrs.evolve(batch_of(), loss_mask=torch.tensor([[0, 1, 1], [0, 0, 1]]).bool())
    old = torch.tensor([[9.0, -0.4, -0.6], [9.0, 9.0, -0.2]])
    ref = torch.tensor([[0.0, -0.8, -0.8], [0.0, 0.0, -0.8]])
    shaping = reward_shaping(algorithm)
    rewards, metrics = shaping(batch.with_fields(old_logprobs=old, ref_logprobs=ref))
    assert {name: pytest.approx(value) for name, value in metrics.items()} == {
        "loss/avg_kl": 0.45,
        "loss/avg_kl_max": 0.5,
        "loss/kl_loss_coef": 0.5,
    }
    torch.testing.assert_close(rewards, torch.tensor([[0.0, -0.2, 0.9], [0.0, 0.0, -0.3]]))
    assert shaping.state() == {"kl_coef": pytest.approx(0.5 * (1 + (0.45 / 0.5 - 1) * 2 / 10))}


def conversation(rng: random.Random, index: int, *, apart: bool) -> Trajectory:
    """The same turns of one conversation as one row, or as a row for each turn."""
    prompt = tuple(rng.choices(range(9), k=rng.randint(1, 4)))
    rows = []
    for _ in range(rng.randint(1, 4)):
        action, observation = (tuple(rng.choices(range(9), k=rng.randint(low, 5))) for low in (1, 0))
        rows.append((action, observation, rng.uniform(-1, 1)))
    rows[-1] = (rows[-1][0], (), rows[-1][2])

    def row(prompt: tuple[int, ...], turns: list[Any]) -> TokenRow:
        ids: list[int] = []
        mask: list[int] = []
        rewards = []
        for action, observation, reward in turns:
            ids += action
            rewards.append(TurnReward(token=len(ids) - 1, reward=reward))
            ids += observation
            mask += [1] * len(action) + [0] * len(observation)
        return TokenRow(
            prompt_ids=prompt,
            response_ids=tuple(ids),
            loss_mask=tuple(mask),
            rollout_logprobs=(0.0,) * len(ids),
            weight_versions=(0,) * len(ids),
            rewards=tuple(rewards),
        )

    steps = [row(prompt, rows)]
    if apart:
        steps = []
        for action, observation, reward in rows:
            steps.append(row(prompt, [(action, (), reward)]))
            prompt = (*prompt, *action, *observation)
    last = attrs.asdict(steps[-1], recurse=False)
    return Trajectory(prompt_id="p", sample_index=index, earlier=tuple(steps[:-1]), stop_reason="stop", **last)


def collated(seed: int, *, apart: bool) -> TrainingBatch:
    """Two prompts with three conversations each; each sampled token has its own log-probabilities."""
    rng, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    prompt = Prompt(id="p", messages=(), token_ids=(), env_class="none")
    groups = [
        TrajectoryGroup(prompt=prompt, trajectories=tuple(conversation(rng, index, apart=apart) for index in range(3)))
        for _ in range(2)
    ]
    batch = collate(groups)
    count = int(batch.loss_mask.sum())
    old, ref = (batch.scatter(-torch.rand(count, generator=numbers)) for _ in range(2))
    return batch.with_fields(old_logprobs=old, ref_logprobs=ref)


SHAPINGS = [
    {},
    {"overlong": OverlongConfig(buffer_len=20, max_len=12, penalty_factor=1.0, floor=False)},
    {"overlong": OverlongConfig(buffer_len=6, max_len=9), "norm": NormConfig(mean_level="group", std_level="batch")},
    {"bias": 0.3, "scale": 2.0, "clip": 1.5},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("settings", SHAPINGS)
def test_a_conversation_in_one_row_or_in_several_is_shaped_alike(settings: dict[str, Any], estimator: Any) -> None:
    for seed in range(20):
        totals, all_metrics, states = [], [], []
        for apart in (False, True):
            batch = collated(seed, apart=apart)
            shaping = reward_shaping(
                AlgorithmConfig(
                    use_kl_in_reward=True,
                    use_kl_loss=False,
                    kl_loss_coef=0.5,
                    kl_estimator_type=estimator,
                    kl_ctrl=KLCtrlConfig(type="adaptive", kl_target=0.3, horizon=20),
                    reward_shaping=RewardShapingConfig(**settings),
                )
            )
            rewards, metrics = shaping(batch)
            total = batch.over_trajectories(rewards.sum(1))
            totals.append(total if batch.last_step is None else total[batch.last_step])
            all_metrics.append(metrics)
            states.append(shaping.state())
        torch.testing.assert_close(totals[1], totals[0], atol=1e-5, rtol=1e-5)
        assert all_metrics[1] == pytest.approx(all_metrics[0], abs=1e-6)
        assert states[1] == pytest.approx(states[0], abs=1e-7)


def test_a_reward_at_an_earlier_token_keeps_its_place_scaled() -> None:
    batch = attrs.evolve(batch_of(), rewards=torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    rewards, _ = reward_shaping(AlgorithmConfig(reward_shaping=RewardShapingConfig(bias=1.0, scale=3.0)))(batch)
    assert rewards.tolist() == [[0.0, 3.0, 9.0], [0.0, 0.0, 3.0]]  # (3 + 1) 3 in all, and (0 + 1) 3


def test_the_last_token_of_an_answer_is_the_last_that_is_trained_on_or_else_that_of_its_row() -> None:
    for first, last in (([0, 1, 0], 1), ([1, 0, 0], 0)):
        mask = torch.tensor([first, [0, 0, 0]]).bool()
        batch = attrs.evolve(batch_of(), loss_mask=mask, lengths=torch.tensor([3, 2]))
        raised = reward_shaping(AlgorithmConfig(reward_shaping=RewardShapingConfig(bias=1.0)))
        assert (raised(batch)[0] - batch.rewards).nonzero().tolist() == [[0, last], [1, 1]]
