from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from skyrl.errors import RunError
from skyrl.training.collate import collate
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


def trajectory(
    prompt: tuple[int, ...], answer: tuple[int, ...], reward: float, index: int = 0, mask: int = 1
) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        sample_index=index,
        prompt_ids=prompt,
        response_ids=answer,
        loss_mask=(mask,) * len(answer),
        rollout_logprobs=tuple(-token / 10 for token in answer),
        weight_versions=(0,) * len(answer),
        rewards=(TurnReward(token=len(answer) - 1, reward=reward),),
        stop_reason="stop",
    )


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    prompt = Prompt(id="p", messages=(), token_ids=trajectories[0].prompt_ids, env_class="gsm8k")
    return TrajectoryGroup(prompt=prompt, trajectories=trajectories)


def test_rows_are_prompt_answer_and_padding_with_every_number_on_its_token() -> None:
    batch = collate(
        [
            group(trajectory((5, 6), (7, 8), 1.0), trajectory((5, 6), (9,), 0.0, 1)),
            group(trajectory((4,), (3, 2, 1), 0.5)),
        ]
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [5, 6, 9, 0], [4, 3, 2, 1]]
    assert batch.lengths.tolist() == [4, 3, 4]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch.rollout_logprobs is not None
    torch.testing.assert_close(batch.rollout_logprobs[0], torch.tensor([0.0, 0.0, -0.7, -0.8]))
    assert batch.rewards.tolist() == [[0, 0, 0, 1.0], [0, 0, 0, 0], [0, 0, 0, 0.5]]
    assert batch.groups.tolist() == [0, 0, 1]


def test_an_answer_without_a_token_credits_the_last_token_of_the_prompt() -> None:
    batch = collate([group(trajectory((5, 6), (), -1.0), trajectory((5, 6), (7,), 0.0, 1))])
    assert batch.rewards.tolist() == [[0, -1.0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("reasons", "advice"),
    [
        (["length"], "raise generator.sampling_params.max_generate_length"),
        (["context"], "raise generator.max_input_length"),
        (["length", "context"], "raise generator.sampling_params.max_generate_length and generator.max_input_length"),
    ],
)
def test_a_batch_with_nothing_to_learn_from_says_why(reasons: list[Any], advice: str) -> None:
    rows = [evolve(trajectory((5,), (7,), 0.0, mask=0), stop_reason=reason) for reason in reasons]
    with pytest.raises(RunError, match=f"apply_overlong_filtering leaves out incomplete ones: {advice}$"):
        collate([group(*rows)])


@pytest.mark.parametrize(("second", "is_filtered"), [(0.0, True), (1.0, False)])
def test_answers_that_are_cut_off_are_no_error_if_the_filter_of_equal_rewards_left_them_out(
    second: float, is_filtered: bool
) -> None:
    rows = [
        evolve(trajectory((5,), (7,), reward, index, mask=0), stop_reason="length")
        for index, reward in enumerate((0.0, second))
    ]
    if is_filtered:
        assert not collate([group(*rows)], masks_zero_variance=True).loss_mask.any()
    else:
        with pytest.raises(RunError, match="apply_overlong_filtering"):
            collate([group(*rows)], masks_zero_variance=True)


def test_a_batch_whose_groups_were_all_filtered_is_still_a_batch() -> None:
    assert not collate([group(trajectory((5,), (7,), 0.0, mask=0))]).loss_mask.any()


def test_a_reward_stands_on_a_token_that_is_trained_on() -> None:
    closed = evolve(trajectory((5,), (7, 8, 9), 1.0), loss_mask=(1, 1, 0))  # 9 was appended, not sampled
    assert collate([group(closed)]).rewards.tolist() == [[0, 0, 1.0, 0]]


def test_answers_know_how_long_they_are() -> None:
    batch = collate([group(trajectory((5,), (7,), 1.0), trajectory((5,), (7, 8), 0.0, 1))])
    assert batch.answer_lengths is not None and batch.answer_lengths.tolist() == [1, 2]


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    batch = collate([group(trajectory((5,), (7,), 0.0))])
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(1, 3\), the batch \(1, 2\)"):
        batch.with_fields(old_logprobs=torch.zeros(1, 3))


def test_splitting_trims_padding_and_loses_no_row() -> None:
    batch = collate([group(trajectory((5,), (7,), 0.0), trajectory((5,), (7, 8, 9), 1.0, 1))])
    first, second = batch.split(1)
    assert first.input_ids.tolist() == [[5, 7]]
    assert second.input_ids.tolist() == [[5, 7, 8, 9]]


def test_rows_have_the_baseline_of_their_prompt_where_every_prompt_has_one() -> None:
    one, other = trajectory((5,), (7,), 1.0), trajectory((5,), (8,), 0.0, 1)
    groups = [evolve(group(one, other), baseline=0.5), evolve(group(one), baseline=2.0)]
    baselines = collate(groups).baselines
    assert baselines is not None and baselines.tolist() == [0.5, 0.5, 2.0]
    assert collate([groups[0], evolve(groups[1], baseline=None)]).baselines is None


def test_the_largest_ids_and_the_bits_of_log_probabilities_arrive() -> None:
    sample = evolve(trajectory((2**31, 5), (2**40, 1), 1.0), loss_mask=(1, 0), rollout_logprobs=(-0.1, 0.0))
    batch = collate([group(sample)])
    assert batch.input_ids.tolist() == [[2**31, 5, 2**40, 1]]
    assert batch.loss_mask.tolist() == [[False, False, True, False]]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs[0, 2] == torch.tensor(-0.1)


def test_a_rollout_may_give_arrays_and_lists() -> None:
    original = trajectory((5, 6), (7, 8), 1.0)
    makers: tuple[Any, ...] = (np.array, list)
    for make in makers:
        other = evolve(
            original,
            response_ids=make(original.response_ids),
            loss_mask=make(original.loss_mask),
            rollout_logprobs=make(original.rollout_logprobs),
        )
        batch = collate([group(other)])
        assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
        assert batch.loss_mask.tolist() == [[False, False, True, True]]
