"""Rewards that are all the same at the beginning of a run are reported, once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.config import GeneratorConfig, SamplingParams
from skyrl.config.settings.environment import AgentConfig
from skyrl.rollout.constant_rewards import ConstantRewards, endings
from tests.rollout.test_measures import groups, row

ended = partial(endings, config=GeneratorConfig(max_input_length=30), agent=AgentConfig())


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0, 0, 0, 0], ["all 6 rewards of the first 3 steps are 0"]),
        ([1, 1, 1, 0], ["all 6 rewards of the first 3 steps are 1"]),
        ([0, 1, 1, 1], []),
        ([0, 0, 1, 0], []),
        ([0, 0], []),
    ],
)
def test_equal_rewards_of_the_first_steps_are_reported_once(rewards: list[float], expected: list[str]) -> None:
    heard: list[str] = []
    watched = ConstantRewards(heard.append, Path("run/trajectories.jsonl"), endings=ended)
    for version, reward in enumerate(rewards):
        watched.count(groups(row([1], [reward]), row([1], [reward])), version)
    assert len(heard) == len(expected)
    assert all(words in text for words, text in zip(expected, heard, strict=True))
    assert all("run/trajectories.jsonl" in text for text in heard)


def test_a_run_of_one_step_is_judged_by_it_and_rewards_that_differ_inside_a_step_are_none() -> None:
    heard: list[str] = []
    ConstantRewards(heard.append, Path("x"), steps=1, endings=ended).count(groups(row([1], [0]), row([1], [1])), 0)
    assert heard == []
    ConstantRewards(heard.append, Path("x"), steps=1, endings=ended).count(groups(row([1], [2]), row([1], [2])), 0)
    assert "all 2 rewards of the first step are 2" in heard[0]


def test_samples_without_a_reward_in_the_first_steps_are_reported_with_the_first_reason() -> None:
    heard: list[str] = []
    watched = ConstantRewards(heard.append, Path("x"), steps=2, endings=ended)
    for version in range(2):
        watched.count(groups(evolve(row([1], [0]), skipped="the judge was silent")), version)
    assert heard == [
        "warning: no group of the first 2 steps has all its rewards, and nothing is learned from the others: 2 samples "
        "without a reward, the first one because the judge was silent"
    ]


@pytest.mark.parametrize(
    ("truths", "expected"),
    [([18, 2.5], "The ground truths are numbers (float and int), which equal no text"), ([18, "18"], ""), ([], "")],
)
def test_ground_truths_that_are_numbers_are_named(truths: list[object], expected: str) -> None:
    heard: list[str] = []
    step = groups(row([1], [0]), row([1], [0]))
    extras = [{"reward_spec": {"ground_truth": truth}} for truth in truths] or [{}, {}]
    step = [evolve(group, prompt=evolve(group.prompt, extras=own)) for group, own in zip(step, extras, strict=True)]
    ConstantRewards(heard.append, Path("x"), steps=1, endings=ended).count(step, 0)
    (text,) = heard
    assert (expected or "too easy") in text and ("numbers" in text) == bool(expected)


@pytest.mark.parametrize(
    ("reasons", "generator", "agent", "expected"),
    [
        ({}, {}, {}, ""),
        ({"length": 3}, {}, {}, "3 answers were cut at generator.sampling_params.max_generate_length = 1024"),
        ({"context": 1}, {"max_input_length": 30}, {}, "1 conversation ended at generator.max_input_length = 30"),
        ({"context": 2}, {"max_input_length": None}, {}, "2 conversations ended at the longest sequence of the model"),
        (
            {"context": 2},
            {"max_input_length": None, "sampling_params": SamplingParams(max_tokens=64)},
            {},
            "2 conversations ended at generator.sampling_params.max_tokens = 64",
        ),
        (
            {"context": 2},
            {"max_input_length": 30},
            {"function": "a:b", "max_requests": 4},
            "2 conversations ended at generator.max_input_length = 30 or environment.agent.max_requests = 4",
        ),
        (
            {"length": 1, "context": 2, "stop": 5},
            {"max_input_length": 30},
            {},
            "1 answer was cut at generator.sampling_params.max_generate_length = 1024; "
            "2 conversations ended at generator.max_input_length = 30",
        ),
    ],
)
def test_the_limit_that_ended_a_trajectory_is_the_one_that_is_named(
    reasons: dict[str, int], generator: dict[str, Any], agent: dict[str, Any], expected: str
) -> None:
    assert endings(Counter(reasons), GeneratorConfig(**generator), AgentConfig(**agent)) == expected


def test_trajectories_that_ended_at_a_limit_are_counted_in_the_report() -> None:
    heard: list[str] = []
    watched = ConstantRewards(heard.append, Path("x"), steps=2, endings=ended)
    cut, full, stopped = (evolve(row([1], [0]), stop_reason=reason) for reason in ("length", "context", "stop"))
    watched.count(groups(cut, full, stopped), 0)
    watched.count(groups(full, stopped), 1)
    expected = (
        "all 5 rewards of the first 2 steps are 0 (1 answer was cut at generator.sampling_params.max_generate_length = "
        "1024; 2 conversations ended at generator.max_input_length = 30): nothing is learned"
    )
    assert expected in heard[0]
