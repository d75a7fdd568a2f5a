"""Rewards that are all the same at the beginning of a run are reported, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from skyrl.rollout.constant_rewards import ConstantRewards
from tests.rollout.test_measures import groups, row


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0, 0, 0, 0], ["all 6 rewards of the first 3 steps are 0"]),
        ([1, 1, 1, 0], ["all 6 rewards of the first 3 steps are 1"]),
        ([0, 1, 1, 1], []),
        ([0, 0, 1, 0], []),
        ([0, 0], []),
    ],
)
def test_equal_rewards_of_the_first_steps_are_reported_once(rewards: list[float], said: list[str]) -> None:
    heard: list[str] = []
    watched = ConstantRewards(heard.append, Path("run/trajectories.jsonl"))
    for version, reward in enumerate(rewards):
        watched.count(groups(row([1], [reward]), row([1], [reward])), version)
    assert len(heard) == len(said)
    assert all(words in text for words, text in zip(said, heard, strict=True))
    assert all("run/trajectories.jsonl" in text for text in heard)


def test_a_run_of_one_step_is_judged_by_it_and_rewards_that_differ_inside_a_step_are_none() -> None:
    heard: list[str] = []
    ConstantRewards(heard.append, Path("x"), steps=1).count(groups(row([1], [0]), row([1], [1])), 0)
    assert heard == []
    ConstantRewards(heard.append, Path("x"), steps=1).count(groups(row([1], [2]), row([1], [2])), 0)
    assert "all 2 rewards of the first step are 2" in heard[0]


def test_answers_that_were_cut_are_counted_in_the_report() -> None:
    heard: list[str] = []
    watched = ConstantRewards(heard.append, Path("x"), steps=2)
    cut, ended = evolve(row([1], [0]), stop_reason="length"), row([1], [0])
    watched.count(groups(cut, cut, ended), 0)
    watched.count(groups(cut, ended), 1)
    assert "all 5 rewards of the first 2 steps are 0 (3 answers were cut at max_generate_length)" in heard[0]
