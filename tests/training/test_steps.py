"""Trajectories of several rows: they are compared, cut and weighed as one answer each."""

from __future__ import annotations

from functools import partial

import torch
from attrs import evolve

from skyrl.algorithms.advantages import group_relative, leave_one_out
from skyrl.algorithms.estimators import OPO, Compared
from skyrl.batch import TrainingBatch
from skyrl.config import RewardShapingConfig
from skyrl.config.settings.rewards import NormConfig, OverlongConfig
from skyrl.learners.budget import TokenBudget
from skyrl.training.advantage import RewardShaping
from skyrl.training.collate import collate
from skyrl.training.objective import Reduction, answer_mean
from skyrl.trajectory import Trajectory
from tests.training.test_collate import group, trajectory


def several(*rewards: float, index: int = 0, prompt: tuple[int, ...] = (5, 6)) -> Trajectory:
    """A turn of two tokens for each reward, each in a row of its own."""
    rows = [trajectory((*prompt, *range(20, 20 + turn)), (7, 8), reward) for turn, reward in enumerate(rewards)]
    return evolve(rows[-1], earlier=tuple(row.token_rows[0] for row in rows[:-1]), sample_index=index)


def batch() -> TrainingBatch:
    """Answers of 2, 1, 1 and 3 rows; two prompts."""
    return collate(
        [
            group(several(0.0, 1.0), several(0.0, index=1)),
            group(several(0.5), several(0.0, 0.0, 2.0, index=1)),
        ]
    )


def test_each_step_is_a_row_behind_its_own_prompt() -> None:
    rows = batch()
    assert rows.trajectories is not None and rows.last_step is not None
    assert rows.trajectories.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert rows.last_step.int().tolist() == [0, 1, 1, 1, 0, 0, 1]
    assert rows.groups.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert rows.lengths.tolist() == [4, 5, 4, 4, 4, 5, 6]
    assert rows.input_ids[1].tolist() == [5, 6, 20, 7, 8, 0]
    assert (len(rows), rows.answers) == (7, 4)


def test_answers_of_one_row_are_a_batch_without_steps() -> None:
    rows = collate([group(several(1.0))])
    assert rows.trajectories is None and rows.last_step is None and rows.answers == 1


def test_mini_batches_count_answers_and_cut_none() -> None:
    halves = list(batch().split_by_answers(2))
    assert [len(half) for half in halves] == [3, 4]
    assert [half.answers for half in halves] == [2, 2]
    assert [len(part) for part in batch().split_by_answers(3)] == [4, 3]
    assert [len(part) for part in batch().split_by_answers(9)] == [7]


def test_every_turn_gets_the_advantage_of_its_whole_answer() -> None:
    advantages = Compared(partial(group_relative, normalize_by_std=False))(batch())
    values = [advantages[row][batch().loss_mask[row]].tolist() for row in range(7)]
    assert values[:3] == [[0.5, 0.5], [0.5, 0.5], [-0.5, -0.5]]
    assert values[3:] == [[-0.75, -0.75]] + [[0.75, 0.75]] * 3
    assert Compared(leave_one_out)(batch())[0].max() == 1.0
    # lengths 4 and 2 tokens weigh the rewards 1 and 0: the baseline is 4 / 6
    torch.testing.assert_close(OPO()(batch())[0].max(), torch.tensor(1 - 4 / 6))


def test_every_answer_weighs_the_same_however_many_rows_it_has() -> None:
    weights = answer_mean(batch())
    per_answer = [weights[rows].sum().item() for rows in ([0, 1], [2], [3], [4, 5, 6])]
    assert per_answer == [0.25] * 4
    by_length = Reduction(name="seq_mean_token_sum_norm", max_seq_len=10)(batch())
    torch.testing.assert_close(by_length[batch().loss_mask], torch.full((14,), 1 / 40))


def test_rewards_are_shaped_once_for_each_answer() -> None:
    shaped, _ = RewardShaping(RewardShapingConfig(bias=1.0, scale=2.0), None)(batch())
    totals = [shaped[rows].sum().item() for rows in ([0, 1], [2], [3], [4, 5, 6])]
    assert totals == [4.0, 2.0, 3.0, 6.0]  # (r + 1) * 2
    assert shaped[0].sum() == 0  # nothing is put on an earlier turn
    overlong = OverlongConfig(buffer_len=2, max_len=6)
    punished, _ = RewardShaping(RewardShapingConfig(overlong=overlong), None)(batch())
    assert [punished[rows].sum().item() for rows in ([0, 1], [4, 5, 6])] == [1.0, 1.0]  # 6 tokens: 2 - 1
    normed, _ = RewardShaping(RewardShapingConfig(norm=NormConfig(mean_level="group")), None)(batch())
    assert [normed[rows].sum().item() for rows in ([0, 1], [2], [3], [4, 5, 6])] == [0.5, -0.5, -0.75, 0.75]


def test_a_step_counts_its_own_prompt_where_tokens_are_budgeted() -> None:
    (planned,) = TokenBudget(tokens=10).plan([batch()])
    assert planned.micro_batches is not None
    for number in planned.micro_batches.unique():
        assert planned.lengths[planned.micro_batches == number].sum() <= 10
