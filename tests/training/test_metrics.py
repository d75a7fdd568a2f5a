"""Every metric of a step, by hand on three groups: two prompts with two answers, and one that was dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.rollout.measures import measure
from skyrl.training.describe import describe, describe_advantages
from skyrl.training.evaluation import scores
from skyrl.trajectory import Failure, Prompt, TokenRow, Trajectory, TrajectoryGroup, TurnReward
from tests.training.batches import batch_of


def answer(mask: str, *rewards: float, **more: Any) -> Trajectory:
    """An answer with the loss mask `mask`, one character a token, and one reward for each turn."""
    count = len(mask)
    return Trajectory(
        **{
            "prompt_id": "p",
            "sample_index": 0,
            "prompt_ids": (1, 2),
            "response_ids": (5,) * count,
            "loss_mask": tuple(map(int, mask)),
            "rollout_logprobs": (0.0,) * count,
            "weight_versions": (0,) * count,
            "rewards": tuple(TurnReward(token=0, reward=reward) for reward in rewards),
            "stop_reason": "stop",
            **more,
        }
    )


def group(*answers: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(prompt=Prompt(id="p", messages=(), token_ids=(1, 2), env_class="e"), trajectories=answers)


def seconds(completion: float, llm: float, env: float, run: float) -> dict[str, float]:
    return {"completion": completion, "llm": llm, "env": env, "env_run": run}


LATE = Failure(kind="timeout", reason="late")
BROKEN = Failure(kind="raised", reason="broken")
EARLIER = TokenRow(
    prompt_ids=(1,),
    response_ids=(5, 5),
    loss_mask=(1, 1),
    rollout_logprobs=(0.0, 0.0),
    weight_versions=(0, 0),
    rewards=(TurnReward(token=1, reward=0.0),),
)
GROUPS = [
    group(
        answer("11", 1.0, metrics={"a": 1.0}, timings=seconds(10, 4, 3, 2)),
        answer("110011", 0.0, -2.0, stop_reason="length", timings=seconds(20, 5, 5, 1)),
    ),
    group(
        answer("1111", 0.0, failures=(LATE, BROKEN), metrics={"a": 4.0}, timings=seconds(30, 6, 4, 3)),
        answer("11", 0.0, earlier=(EARLIER,), timings=seconds(40, 7, 8, 4)),
    ),
    group(answer("", failed=True, failures=(LATE,)), answer("1", 1.0)),
]
ALIKE = [group(answer("1", 0.0), answer("1", 0.0)), group(answer("1", 2.0), answer("1", 2.0)), GROUPS[0]]

REWARDS = {
    "reward/avg_raw_reward": -0.25,  # of 1, -2, 0 and 0
    "reward/mean_positive_reward": 0.25,  # of 1, 0, 0 and 0
    "reward/avg_pass_at_2": 0.5,  # the first prompt has an answer above 0, the second has none
    "reward/zero_variance_groups": 0.5,  # the second
}
LENGTHS = {
    "generate/min_num_tokens": 2,  # of 2, 6, 4 and 2 + 2
    "generate/max_num_tokens": 6,
    "generate/avg_num_tokens": 4.0,
    "generate/std_num_tokens": 2**0.5,
    "generate/avg_tokens_non_zero_rewards": 4.0,  # of 2 and 6
    "generate/avg_tokens_zero_rewards": 4.0,
    "generate/min_assistant_tokens": 2,  # of 2, 4, 4 and 4
    "generate/max_assistant_tokens": 4,
    "generate/avg_assistant_tokens": 3.5,
    "generate/std_assistant_tokens": 0.75**0.5,
    "generate/avg_assistant_tokens_non_zero_rewards": 3.0,  # of 2 and 4
    "generate/avg_assistant_tokens_zero_rewards": 4.0,
    "generate/truncated_ratio": 0.25,  # the second answer
    "generate/num_tokens": 16,
}
TURNS = {
    "generate/avg_num_turns": 1.5,  # of 1, 2, 1 and 2
    "generate/avg_num_rows": 1.25,  # of 1, 1, 1 and 2
    "generate/tokens_per_turn_mean": 14 / 6,  # of 2; 2 and 2; 4; 2 and 2
    "generate/tokens_per_turn_std": (5 / 9) ** 0.5,
    "generate/tokens_per_turn_max": 4,
}
TIMES = {
    "generate/trajectory_time_completion_mean": 25.0,  # of 10, 20, 30 and 40
    "generate/trajectory_time_completion_p90": 37.0,  # seven tenths of the way from 30 to 40
    "generate/trajectory_time_completion_max": 40.0,
    "generate/trajectory_time_llm_mean": 5.5,  # of 4, 5, 6 and 7
    "generate/trajectory_time_llm_p90": 6.7,
    "generate/trajectory_time_llm_max": 7.0,
    "generate/trajectory_time_env_mean": 5.0,  # of 3, 5, 4 and 8
    "generate/trajectory_time_env_p90": 7.1,
    "generate/trajectory_time_env_max": 8.0,
    "generate/trajectory_time_other_mean": 14.5,  # of 3, 10, 20 and 25
    "generate/trajectory_time_other_p90": 23.5,
    "generate/trajectory_time_other_max": 25.0,
    "generate/trajectory_time_env_run_mean": 2.5,  # of 2, 1, 3 and 4
    "generate/trajectory_time_env_run_p90": 3.7,
    "generate/trajectory_time_env_run_max": 4.0,
}
OTHERS = {
    "generate/repeated_ratio": 0.0,  # no answer has more than one run of four sampled tokens
    "environment/a": 2.5,  # of 1 and 4: two answers have it
    "rollout/failures_timeout": 2,
    "rollout/failures_raised": 1,
    "rollout/failures": 3,
    "rollout/replaced_samples": 1,  # the third; the one that failed for good was not replaced
    "rollout/skipped_samples": 0,
    "rollout/filled_samples": 0,
    "rollout/dropped_groups": 1,
}


def test_what_was_sampled_is_measured_as_by_hand() -> None:
    assert measure(GROUPS) == pytest.approx({**LENGTHS, **TURNS, **TIMES, **OTHERS})


def test_a_step_is_described_as_by_hand() -> None:
    assert describe(GROUPS) == pytest.approx({**REWARDS, **LENGTHS, **TURNS, **TIMES, **OTHERS})


def test_groups_whose_answers_are_worth_the_same_are_counted() -> None:
    metrics = describe(ALIKE)
    assert metrics["reward/zero_variance_groups"] == pytest.approx(2 / 3)
    assert metrics["reward/avg_pass_at_2"] == pytest.approx(2 / 3)
    assert metrics["reward/mean_positive_reward"] == pytest.approx(5 / 6)  # of 0, 0, 2, 2, 1 and 0


def test_where_every_group_was_dropped_only_failures_are_counted() -> None:
    assert describe(GROUPS[2:]) == {
        "rollout/failures_timeout": 1,
        "rollout/failures": 1,
        "rollout/replaced_samples": 0,
        "rollout/skipped_samples": 0,
        "rollout/filled_samples": 0,
        "rollout/dropped_groups": 1,
    }


def test_advantages_are_described_as_by_hand() -> None:
    batch = batch_of()  # four tokens with advantages 1, 1, -1 and -1 become 3, 1, 0 and 0; the rewards are 1 and 0
    advantages = torch.tensor([[0.0, 3.0, -1.0], [0.0, 0.0, 0.0]])
    assert describe_advantages(evolve(batch, advantages=advantages)) == {
        "loss/avg_final_rewards": 0.5,
        "loss/avg_raw_advantages": 0.5,
        "loss/avg_raw_advantages_abs": 1.0,
        "loss/rows_without_advantage": 0.5,
    }


def test_advantages_of_a_batch_without_a_token_to_train_on_are_zero() -> None:
    batch = evolve(batch_of(), loss_mask=torch.zeros(2, 3, dtype=torch.bool))
    assert describe_advantages(batch)["loss/avg_raw_advantages"] == 0.0


@pytest.mark.parametrize(
    ("rewards", "positive"),
    [
        ((1.0, -3.0), 1.0),
        ((-1.0, 3.0), 3.0),
        ((2.0, 3.0), 5.0),
        ((-1.0, -2.0), 0.0),
        ((0.5, -0.5, 1.0), 1.5),
        ((), 0.0),
    ],
)
def test_the_positive_reward_is_that_of_each_turn(rewards: tuple[float, ...], positive: float) -> None:
    """SkyRL takes the positive part of each token's reward, then the sum: not of the answer's total."""
    row = answer("1" * 8)
    together = evolve(
        row, rewards=tuple(TurnReward(token=token, reward=reward) for token, reward in enumerate(rewards))
    )
    apart = evolve(together, earlier=(evolve(EARLIER, rewards=together.rewards[:1]),), rewards=together.rewards[1:])
    for variant in (together, apart):
        groups = [group(variant, row)]
        assert describe(groups)["reward/mean_positive_reward"] == positive / 2
        assert scores(groups, 2)["mean_positive_reward"] == positive / 2
