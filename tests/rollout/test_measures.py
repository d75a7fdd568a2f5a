from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from skyrl.rollout.filters import backfilled
from skyrl.rollout.measures import measure
from skyrl.rollout.transcript import Transcript
from skyrl.trajectory import Failure, Prompt, TokenRow, Trajectory, TrajectoryGroup, TurnReward


def row(mask: list[int], rewards: list[float], **more: Any) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        sample_index=0,
        prompt_ids=(1,),
        response_ids=(5,) * len(mask),
        loss_mask=tuple(mask),
        rollout_logprobs=(0.0,) * len(mask),
        weight_versions=(0,) * len(mask),
        rewards=tuple(TurnReward(token=0, reward=reward) for reward in rewards),
        stop_reason="stop",
        **more,
    )


def groups(*rows: Trajectory) -> list[TrajectoryGroup]:
    prompt = Prompt(id="p", messages=(), token_ids=(1,), env_class="e")
    return [TrajectoryGroup(prompt=prompt, trajectories=(trajectory,)) for trajectory in rows]


def test_what_environments_measured_is_averaged_over_those_that_have_it() -> None:
    metrics = measure(groups(row([1], [1], metrics={"a": 1.0}), row([1], [1], metrics={"a": 3.0, "b": 5.0})))
    assert (metrics["environment/a"], metrics["environment/b"]) == (2.0, 5.0)


def test_failures_are_counted_by_kind_and_a_dropped_group_is_measured_nowhere_else() -> None:
    late, broken = Failure(kind="timeout", reason="late"), Failure(kind="raised", reason="broken")
    metrics = measure(
        groups(row([1, 1], [1]), row([1], [1], failures=(late, broken)), row([], [], failures=(late,), failed=True))
    )
    assert metrics["rollout/failures"] == 3
    assert (metrics["rollout/failures_timeout"], metrics["rollout/failures_raised"]) == (2, 1)
    assert (metrics["rollout/replaced_samples"], metrics["rollout/dropped_groups"]) == (1, 1)
    assert metrics["generate/avg_num_tokens"] == 1.5


def test_rows_are_counted_for_each_trajectory() -> None:
    """One trajectory of 2 rows and one of 1: 3 rows over 2 trajectories."""
    earlier = TokenRow(
        prompt_ids=(1,),
        response_ids=(5,),
        loss_mask=(1,),
        rollout_logprobs=(0.0,),
        weight_versions=(0,),
        rewards=(TurnReward(token=0, reward=0.0),),
    )
    metrics = measure(groups(row([1], [1], earlier=(earlier,)), row([1], [1])))
    assert (metrics["generate/avg_num_rows"], metrics["generate/avg_num_turns"]) == (1.5, 1.5)


def test_an_answer_of_which_nothing_was_sampled_has_turns_of_no_tokens() -> None:
    metrics = measure(groups(row([0], [1])))
    assert [metrics[f"generate/tokens_per_turn_{statistic}"] for statistic in ("mean", "std", "max")] == [0.0, 0.0, 0]


def test_the_ninetieth_percentile_lies_between_neighbours() -> None:
    """13 answers took 0, 1, ... 11 and 100 seconds: nine tenths of the way from the first to the last is place 10.8."""
    took = [row([1], [1], timings={"completion": seconds, "llm": 0.0, "env": 0.0}) for seconds in (*range(12), 100)]
    metrics = measure(groups(*took))
    assert metrics["generate/trajectory_time_completion_p90"] == pytest.approx(10.8)


def test_a_sample_without_reward_is_filled_with_the_next_that_has_one() -> None:
    rows = (row([1], [3.0]), row([], [], failed=True), row([1], [5.0]))
    group = evolve(groups(rows[0])[0], trajectories=rows)
    assert backfilled(group).rewards == (3.0, 5.0, 5.0)


def test_tokens_that_are_placed_before_any_turn_are_of_the_first_version() -> None:
    transcript = Transcript((1,))
    transcript.place((5, 6))
    assert (transcript.versions, transcript.sampled, transcript.logprobs) == ([0, 0], [0, 0], [0.0, 0.0])


def test_parts_of_the_reward_are_averaged_by_name_over_the_answers_that_have_them() -> None:
    right, short = {"correct": 1.0, "format": 0.5}, {"correct": 0.0}
    metrics = measure(groups(row([1], [1], components=right), row([1], [1], components=short), row([1], [1])))
    assert (metrics["reward/component/correct"], metrics["reward/component/format"]) == (0.5, 0.5)


def test_repeated_text_is_the_share_of_runs_of_four_tokens_that_came_before() -> None:
    """`abcdabcd` has the runs abcd, bcda, cdab, dabc, abcd: one of five came before. Three tokens have no run."""
    twice = evolve(row([1] * 8, [1]), response_ids=(1, 2, 3, 4) * 2)
    assert measure(groups(twice))["generate/repeated_ratio"] == pytest.approx(1 / 5)
    assert measure(groups(twice, row([1] * 3, [1])))["generate/repeated_ratio"] == pytest.approx(1 / 10)
    assert measure(groups(evolve(twice, loss_mask=(1, 1, 1, 1, 0, 0, 0, 0))))["generate/repeated_ratio"] == 0.0
