"""Where each turn is a row: the last turn is compared, and all turns of its trajectory get what it got."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch

from skyrl.algorithms.advantages import (
    broadcast_last_advantage,
    group_relative,
    leave_one_out,
    relative_to_mean,
    rescaled_for_silent_groups,
)
from skyrl.algorithms.estimators import OPO, AdvantageEstimator, Compared, ReinforcePlusPlusBaseline, ReMax
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, NormConfig, OverlongConfig, RewardShapingConfig
from skyrl.training.advantage import reward_shaping

# Three trajectories of two prompts: the first has two turns of one token, the second one turn of two, the third two.
# Rows are in no order.
TRAJECTORIES = (1, 0, 2, 0, 2)
LAST = (True, False, False, True, True)
GROUPS = (8, 8, 3, 8, 3)
REWARDS = ((0.0, 0.0, 1.0), (0.0, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 2.5, 0.0), (0.0, 1.0, 0.0))
MASK = ((0, 1, 1), (0, 1, 0), (0, 1, 0), (0, 1, 0), (0, 1, 0))


def turns() -> TrainingBatch:
    """Trajectories 0 and 1, of returns 3 and 1, answer one prompt; trajectory 2, of return 2, the other."""
    return TrainingBatch(
        input_ids=torch.ones(5, 3, dtype=torch.long),
        lengths=torch.tensor([3, 2, 2, 2, 2]),
        loss_mask=torch.tensor(MASK).bool(),
        rollout_logprobs=torch.zeros(5, 3),
        rewards=torch.tensor(REWARDS),
        groups=torch.tensor(GROUPS),
        answer_lengths=torch.tensor([2, 1, 1, 1, 1]),
        baselines=torch.tensor([0.5, 0.5, 0.0, 0.5, 0.0]),
        trajectories=torch.tensor(TRAJECTORIES),
        last_step=torch.tensor(LAST),
    )


@pytest.mark.parametrize(
    ("estimate", "of_trajectories"),
    [
        (
            Compared(partial(group_relative, normalize_by_std=False)),
            (1.0, -1.0, 2.0),
        ),  # less the mean of 3 and 1; a prompt with one answer keeps 2
        (Compared(leave_one_out), (2.0, -2.0, 0.0)),
        (Compared(relative_to_mean), (0.5, -0.5, 2.0)),
        (OPO(), (1.0, -1.0, 2.0)),  # both answers have two tokens, so that the weighted mean is 2
        (ReMax(), (2.5, 0.5, 2.0)),
        (Compared(rescaled_for_silent_groups), (1.0, -1.0, 2.0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_turn_gets_what_its_whole_trajectory_is_worth(
    estimate: AdvantageEstimator, of_trajectories: tuple[float, ...]
) -> None:
    expected = torch.tensor([of_trajectories[number] for number in TRAJECTORIES]).unsqueeze(1) * torch.tensor(MASK)
    torch.testing.assert_close(estimate(turns()), expected, atol=1e-5, rtol=0)


def test_a_trajectory_in_one_row_or_in_several_is_worth_the_same() -> None:
    batch = TrainingBatch(
        input_ids=torch.ones(3, 3, dtype=torch.long),
        lengths=torch.tensor([3, 3, 3]),
        loss_mask=torch.tensor([[0, 1, 1]] * 3).bool(),
        rollout_logprobs=torch.zeros(3, 3),
        rewards=torch.tensor([[0.0, 0.5, 2.5], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0]]),
        groups=torch.tensor([8, 8, 3]),
    )
    for estimate in (
        Compared(partial(group_relative, normalize_by_std=True)),
        Compared(leave_one_out),
        Compared(relative_to_mean),
        OPO(),
        Compared(rescaled_for_silent_groups),
        ReinforcePlusPlusBaseline(),
    ):
        of_rows = estimate(batch)[torch.tensor(TRAJECTORIES), 1]
        torch.testing.assert_close(estimate(turns())[:, 1], of_rows, atol=1e-6, rtol=1e-5)


def test_a_trajectory_has_exactly_one_last_turn() -> None:
    with pytest.raises(ValueError, match="last: every trajectory needs exactly one last row"):
        broadcast_last_advantage(torch.zeros(3), torch.tensor([4, 4, 6]), torch.tensor([True, True, True]))
    with pytest.raises(ValueError, match="exactly one last row"):
        broadcast_last_advantage(torch.zeros(3), torch.tensor([4, 4, 6]), torch.tensor([False, True, False]))


def test_shaping_changes_a_trajectory_once_at_its_last_turn() -> None:
    shaping = RewardShapingConfig(
        overlong=OverlongConfig(buffer_len=1, max_len=3, penalty_factor=1.0),
        bias=1.0,
        scale=2.0,
        norm=NormConfig(mean_level="group"),
    )
    lengths = torch.tensor([2, 3, 2, 3, 2])  # trajectory 0 has 3 tokens, which costs 1
    batch = attrs.evolve(turns(), trajectory_lengths=lengths)
    rewards, _ = reward_shaping(AlgorithmConfig(reward_shaping=shaping))(batch)
    # 3 - 1, 1 and 2 become (r + 1) 2 = 6, 4 and 6, less the means of their groups 1, -1 and 0
    torch.testing.assert_close(batch.over_trajectories(rewards.sum(1)), torch.tensor([-1.0, 1.0, 0.0, 1.0, 0.0]))
    assert rewards[1].tolist() == [0.0, 1.0, 0.0]  # a turn before the last has its own, scaled
    assert rewards[2].tolist() == [0.0, 2.0, 0.0]
