"""A list of rewards is one reward, their weighted sum; rewards that ask TRL's trainer for more than texts get it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl.config import ConfigError, SkyRLTrainConfig, check, load
from skyrl.config.loading.code_digests import code_digests
from skyrl.config.loading.stored_code import named_code
from skyrl.config.settings.environment import EnvironmentConfig, weighted_names
from skyrl.envs import group_reward
from skyrl.envs.env import EnvStep, SampleAwareEnv, SampledAnswer
from skyrl.envs.registry import find_env
from skyrl.envs.reward_functions import PlainReward
from skyrl.errors import SkipSample, TaskError

REWARDS = """
from skyrl.envs import group_reward

def right(completion, ground_truth, **columns):
    return float(completion == ground_truth)

def brief(completions, completion_ids, **columns):
    return [-0.25 * len(ids) for ids in completion_ids]

def unsure(completions, **columns):
    return [None for _ in completions]

def parts(completion, **columns):
    return {"reward": 2.0, "format": 1.0}

async def later(completion, **columns):
    return 10.0

@group_reward
def compared(completions, **columns):
    return [0.0 for _ in completions]
"""
ROW = {"reward_spec": {"ground_truth": "4"}}
PROMPT = ({"role": "user", "content": "2+2?"},)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def environment(file: Path, *names: str, weights: list[float] | None = None) -> EnvironmentConfig:
    return EnvironmentConfig(
        env_class=tuple(f"{file}:{name}" if name not in ("gsm8k", "aime") else name for name in names),
        reward_weights=None if weights is None else tuple(weights),
    )


def judged(
    task: str | None, action: str = "4", tokens: tuple[int, ...] = (1, 2)
) -> tuple[EnvStep, Mapping[str, float]]:
    env = find_env(task or "")(ROW)
    env.init(PROMPT)
    if isinstance(env, SampleAwareEnv):
        env.set_sampled(SampledAnswer(token_ids=tokens, version=3))
    step = env.step(action)
    metrics = env.get_metrics()
    env.close()
    return step, metrics


@pytest.mark.parametrize(
    ("names", "weights", "reward", "components"),
    [
        (("right", "brief"), None, 0.5, {"right": 1.0, "brief": -0.5}),
        (("right", "brief"), [2.0, 0.5], 1.75, {"right": 1.0, "brief": -0.5}),
        (("right", "later"), [1.0, 0.1], 2.0, {"right": 1.0, "later": 10.0}),
        (("right", "parts"), None, 3.0, {"right": 1.0, "parts": 2.0, "parts/format": 1.0}),
        (("right", "unsure"), None, 1.0, {"right": 1.0}),
        (("right",), [3.0], 3.0, {"right": 1.0}),
        (("gsm8k", "right"), [1.0, -1.0], -1.0, {"gsm8k": 0.0, "right": 1.0}),
    ],
)
def test_the_weighted_sum_is_the_reward_and_each_part_a_component(
    names: tuple[str, ...], weights: list[float] | None, reward: float, components: dict[str, float], file: Path
) -> None:
    step, _ = judged(environment(file, *names, weights=weights).task)
    assert (step.components, step.done) == (components, True)
    assert step.reward == pytest.approx(reward)


def test_a_sample_without_any_reward_is_skipped(file: Path) -> None:
    with pytest.raises(SkipSample, match="has no reward"):
        judged(environment(file, "unsure", weights=[2.0]).task)


def test_a_part_that_is_no_number_is_named(file: Path) -> None:
    file.write_text("def word(completion, **columns):\n    return 'good'\n")
    env = find_env(environment(file, "word", "gsm8k").task or "")(ROW)
    with pytest.raises(TypeError, match=r"word gave the reward 'good', which is not a number"):
        env.step("4")


def test_a_reward_that_compares_a_group_is_refused(file: Path) -> None:
    with pytest.raises(TaskError, match="compares the answers of a group"):
        find_env(environment(file, "right", "compared").task or "")


@pytest.mark.parametrize("weights", [None, [1.0, 0.5], [0.1, 1e-9], [-1.0, 3.0]])
def test_the_text_of_a_task_names_its_rewards_and_weights(weights: list[float] | None, file: Path) -> None:
    settings = environment(file, "right", "gsm8k", weights=weights)
    assert weighted_names(settings.task or "") == tuple(zip(weights or [1.0, 1.0], settings.names, strict=True))


def problems(*arguments: str) -> list[str]:
    run = load([], [*arguments, "trainer.policy.model.path=a"], environ={}).config
    return [f"{problem.path}: {problem.message}" for problem in check(run) if problem.path.startswith("environment")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (['environment.env_class=["gsm8k","aime"]', "environment.reward_weights=[1]"], "1 weights for 2 rewards"),
        (
            ["environment.env_class=gsm8k", "environment.reward_weights=[1,2]"],
            "acts only when environment.env_class",
        ),
        (['environment.env_class=["gsm8k","multiply"]'], "multiply has several turns"),
        (['environment.env_class=["gsm8k","gsm9k"]'], "no environment 'gsm9k' is built in"),
        (['environment.env_class=["reward_model","gsm8k"]'], "no reward model is given"),
    ],
)
def test_each_item_of_a_list_is_checked(arguments: list[str], message: str) -> None:
    assert any(message in problem for problem in problems(*arguments))


@pytest.mark.parametrize("value", ["[]", '["gsm8k","gsm8k"]', '["gsm8k + aime","aime"]'])
def test_a_list_has_different_names(value: str) -> None:
    with pytest.raises(ConfigError, match="a list of different names"):
        load([], [f"environment.env_class={value}"], environ={})


def test_the_code_of_every_reward_is_named_and_digested(file: Path) -> None:
    other = file.with_name("other.py")
    other.write_text("def one(completion, **columns):\n    return 1.0\n")
    run = SkyRLTrainConfig(environment=EnvironmentConfig(env_class=(f"{file}:right", f"{other}:one", "gsm8k")))
    assert [*code_digests(run)] == ["environment.env_class: rewards.py", "environment.env_class: other.py"]
    [(path, value, _)] = named_code(run)
    assert (path, value) == ("environment.env_class", run.environment.env_class)


def returned(function: Any) -> tuple[EnvStep, Mapping[str, float]]:
    env = PlainReward(function)(ROW)
    assert isinstance(env, SampleAwareEnv)
    env.init(PROMPT)
    env.set_sampled(SampledAnswer(token_ids=(7, 8, 9), version=3))
    return env.step("4"), env.get_metrics()


def of_tokens(completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def of_the_step(completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
    return [float(trainer_state.global_step)]


def of_all(completions: Any, **columns: Any) -> list[float]:
    return [float(len(columns["completion_ids"][0]) + columns["trainer_state"].global_step)]


def logging(completions: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
    log_metric("mine", 0.5)
    log_extra("length", [2])
    log_extra("said", ["four"])
    return [1.0]


def as_array(completions: Any, **columns: Any) -> Any:
    return np.array([1.5])


def as_tensor(completions: Any, **columns: Any) -> Any:
    return torch.tensor([2.5])


def with_tensors(completions: Any, **columns: Any) -> Any:
    return [torch.tensor(3.5)]


@pytest.mark.parametrize(
    ("function", "reward", "metrics"),
    [
        (of_tokens, 3.0, {}),
        (of_the_step, 3.0, {}),
        (of_all, 6.0, {}),
        (logging, 1.0, {"mine": 0.5, "length": 2.0}),
        (as_array, 1.5, {}),
        (as_tensor, 2.5, {}),
        (with_tensors, 3.5, {}),
    ],
)
def test_a_trl_reward_gets_what_its_trainer_gives(function: Any, reward: float, metrics: dict[str, float]) -> None:
    step, measured = returned(function)
    assert (float(step.reward), measured) == (reward, metrics)


def test_the_trainers_state_says_what_it_lacks() -> None:
    def epochs(completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
        return [float(trainer_state.epoch)]

    with pytest.raises(AttributeError, match="has only global_step here, and no epoch"):
        returned(epochs)


def test_a_group_reward_gets_tokens_and_logs(file: Path) -> None:
    from skyrl.envs.group_rewards import GroupReward

    @group_reward
    def longest(completions: Any, completion_ids: Any, log_metric: Any, **columns: Any) -> Any:
        log_metric("longest", max(map(len, completion_ids)))
        return torch.tensor([float(len(ids)) for ids in completion_ids])

    measured: dict[str, float] = {}
    sampled = [SampledAnswer(token_ids=(1,)), SampledAnswer(token_ids=(1, 2))]
    assert GroupReward(longest).rewards(PROMPT, ["a", "b"], ROW, sampled, measured) == [1.0, 2.0]
    assert measured == {"longest": 2.0}
