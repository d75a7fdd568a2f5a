from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.rollout.measures import measure
from skyrl.trajectory import Failure, Prompt, Trajectory, TrajectoryGroup, TurnReward


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
    return [TrajectoryGroup(prompt=prompt, trajectories=(each,)) for each in rows]


def test_metrics_are_those_of_the_reference(reference: Path) -> None:
    cases = json.loads((reference / "algorithm_cases.json").read_text(encoding="utf-8"))["cases"]
    (case,) = [case for case in cases if case["function"] == "rollout_metrics"]
    given = case["inputs"]
    rewards = [reward if isinstance(reward, list) else [reward] for reward in given["rewards"]]
    clocks = zip(given["completion_times"], given["splits"]["llm"], given["splits"]["env"], strict=True)
    timings = [{"completion": whole, "llm": llm, "env": env} for whole, llm, env in clocks]
    rows = [row(*each[:2], timings=each[2]) for each in zip(given["loss_masks"], rewards, timings, strict=True)]
    found = measure(groups(*rows))
    assert {name: found[name] for name in case["expected"]} == pytest.approx(case["expected"], rel=1e-9)


def test_what_environments_measured_is_averaged_over_those_that_have_it() -> None:
    found = measure(groups(row([1], [1], metrics={"a": 1.0}), row([1], [1], metrics={"a": 3.0, "b": 5.0})))
    assert (found["environment/a"], found["environment/b"]) == (2.0, 5.0)


def test_failures_are_counted_by_kind_and_a_dropped_group_is_measured_nowhere_else() -> None:
    late, broken = Failure(kind="timeout", reason="late"), Failure(kind="raised", reason="broken")
    found = measure(
        groups(row([1, 1], [1]), row([1], [1], failures=(late, broken)), row([], [], failures=(late,), failed=True))
    )
    assert found["rollout/failures"] == 3
    assert (found["rollout/failures_timeout"], found["rollout/failures_raised"]) == (2, 1)
    assert (found["rollout/replaced_samples"], found["rollout/dropped_groups"]) == (1, 1)
    assert found["generate/avg_num_tokens"] == 1.5
