from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.envs import Env, find_env
from skyrl.envs.gymnasium_text import GymnasiumTextEnv
from skyrl.envs.reward_functions import RewardFunctionEnv, lacking, required_columns
from skyrl.errors import TaskError

EXTRAS = {"reward_spec": {"ground_truth": "4"}, "extra_info": {"index": 7}, "level": "easy"}
PROMPT = ({"role": "user", "content": "2+2?"},)


def judged(function: Any, answer: str = "4") -> tuple[Any, dict[str, float]]:
    env = RewardFunctionEnv(EXTRAS, function)
    env.init(PROMPT)
    return env.step(answer).reward, env.get_metrics()


def test_a_function_of_trl_sees_a_batch_of_one_in_lists() -> None:
    def accuracy(completions: Any, ground_truth: Any, level: Any, **others: Any) -> list[float]:
        assert (level, others["prompts"]) == (["easy"], [[dict(message) for message in PROMPT]])
        texts = [completion[0]["content"] for completion in completions]
        return [float(text == truth) for text, truth in zip(texts, ground_truth, strict=True)]

    assert judged(accuracy) == (1.0, {})
    assert judged(accuracy, "5") == (0.0, {})


def test_a_function_of_skyrl_may_name_the_parts_of_its_reward() -> None:
    env = RewardFunctionEnv(EXTRAS, lambda completion, **columns: {"reward": 1.5, "correct": 1.0, "format": 0.5})
    step = env.step("4")
    assert (step.reward, step.components) == (1.5, {"correct": 1.0, "format": 0.5})


def test_a_function_of_trl_that_gives_no_list_of_one_is_a_failure() -> None:
    def broken(completions: Any, **others: Any) -> list[float]:
        return [1.0, 1.0]

    with pytest.raises(TypeError, match="one number for each completion"):
        judged(broken)


def test_a_function_of_verl_gives_a_number_or_a_score_with_other_numbers() -> None:
    def compute_score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        assert extra_info == {"index": 7}
        return {"score": float(solution_str == ground_truth), "format": 0.5, "pred": solution_str}

    assert judged(compute_score) == (1.0, {"format": 0.5})
    assert judged(lambda data_source, solution_str, ground_truth, extra_info: 0.25) == (0.25, {})


@pytest.mark.parametrize(
    ("output", "reward", "metrics"),
    [
        ({"rewards": [1.0]}, 1.0, {}),
        ({"rewards": 0.5, "scores": [1]}, 0.5, {"score": 1.0}),
        ({"rewards": np.array([0.25]), "extra_logs": {"length": [3]}}, 0.25, {"length": 3.0}),
        ({"rewards": [[2.0]], "scores": None, "extra_logs": None}, 2.0, {}),
        ({"rewards": [True], "scores": [0.5], "extra_logs": {"a": np.array(2)}}, 1.0, {"a": 2.0, "score": 0.5}),
    ],
)
def test_a_function_of_openrlhf_gives_rewards_and_scores(output: Any, reward: float, metrics: dict[str, float]) -> None:
    def reward_func(queries: Any, prompts: Any, labels: Any, **others: Any) -> Any:
        assert (queries[0].removeprefix(prompts[0]), labels) == ("4", ["4"])
        assert "2+2" in prompts[0]
        return output

    assert judged(reward_func) == (reward, metrics)


@pytest.mark.parametrize("output", [1.0, {}, {"rewards": [1.0, 2.0]}, {"rewards": "1"}, {"rewards": [None]}])
def test_a_function_of_openrlhf_that_gives_no_reward_is_a_failure(output: Any) -> None:
    with pytest.raises(TypeError, match="OpenRLHF reward function"):
        judged(lambda queries, prompts, labels: output)


class Corridor:
    """Gymnasium's interface, in text: say `on` twice."""

    def __init__(self) -> None:
        self.place, self.closed = 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return f"place {self.place}, seed {seed}", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += action == "on"
        return f"place {self.place}", float(self.place == 2), self.place == 2, False, {}

    def close(self) -> None:
        self.closed = True


def test_a_gymnasium_environment_of_text_plays_an_episode() -> None:
    corridor = Corridor()
    env = GymnasiumTextEnv({"seed": 3}, lambda: corridor)
    messages, _ = env.init(PROMPT)
    assert messages == (*PROMPT, {"role": "user", "content": "place 0, seed 3"})
    first, last = env.step("on"), env.step("on")
    env.close()
    assert (first.reward, first.done, first.observations[0]["content"]) == (0.0, False, "place 1")
    assert (last.reward, last.done, last.observations) == (1.0, True, ())
    assert (env.get_metrics(), corridor.closed) == ({"steps": 2.0}, True)


def test_observations_that_are_no_text_are_refused() -> None:
    class Numbers(Corridor):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return [0.0], {}

    with pytest.raises(TaskError, match="list, not text"):
        GymnasiumTextEnv({}, Numbers).init(PROMPT)


def test_a_function_of_extras_makes_environments(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "from skyrl.envs import Env, EnvStep\n"
        "class Task(Env):\n"
        "    def step(self, action): return EnvStep(reward=self.extras['pay'], done=True)\n"
        "def make(extras): return Task({**extras, 'pay': 0.5})\n",
        encoding="utf-8",
    )
    make: Any = find_env(f"{file}:make")
    env: Env = make({})
    assert isinstance(env.extras, Mapping)
    assert env.step("x").reward == 0.5


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (lambda completion, ground_truth, level, **others: 1.0, ("ground_truth", "level")),
        (lambda completion, prompt, data_source, ground_truth: 1.0, ("ground_truth",)),
        (lambda completion, ground_truth=None, *, level=1, **others: 1.0, ()),
        (lambda completions, prompts, ground_truth, **others: [1.0], ("ground_truth",)),
        (lambda data_source, solution_str, ground_truth, extra_info: 1.0, ("ground_truth",)),
        (lambda queries, prompts, labels: {}, ("ground_truth",)),
        (max, ()),
    ],
)
def test_a_reward_function_asks_rows_for_parameters_without_a_default(function: Any, columns: tuple[str, ...]) -> None:
    assert required_columns(function) == columns


@pytest.mark.parametrize(
    ("extras", "missing"),
    [
        ({"reward_spec": {"ground_truth": "4"}, "level": 1}, ()),
        ({"reward_model": {"ground_truth": "4"}, "level": 1}, ()),
        ({"ground_truth": 0, "level": 0}, ()),
        ({"reward_spec": {"ground_truth": None}}, ("ground_truth", "level")),
        ({"reward_spec": "4", "level": 1}, ("ground_truth",)),
    ],
)
def test_a_row_lacks_what_it_has_no_value_for(extras: dict[str, Any], missing: tuple[str, ...]) -> None:
    assert lacking(("ground_truth", "level"), extras) == missing


def test_a_reward_function_gets_the_prompt_and_the_source_that_it_names() -> None:
    def checks_both(answer: str, prompt: Any, data_source: Any, **others: Any) -> float:
        return float((prompt, data_source, set(others)) == (list(PROMPT), "sums", {"level", "ground_truth"}))

    def names_neither(answer: str, **others: Any) -> float:
        return float(set(others) == {"level", "ground_truth"})

    for function in (checks_both, names_neither):
        env = RewardFunctionEnv({"data_source": "sums", "level": 1}, function)
        env.init(PROMPT)
        assert env.step("x").reward == 1.0


def test_a_reward_function_gets_a_column_prompt_of_the_row_before_the_messages() -> None:
    env = RewardFunctionEnv({"prompt": "a column"}, lambda answer, prompt, **others: float(prompt == "a column"))
    env.init(PROMPT)
    assert env.step("x").reward == 1.0


def test_the_ground_truth_of_a_file_of_verl_is_found() -> None:
    def truth(answer: str, ground_truth: str, **others: Any) -> float:
        return float(ground_truth)

    env = RewardFunctionEnv({"reward_model": {"ground_truth": "4"}}, truth)
    env.init(PROMPT)
    assert env.step("x").reward == 4.0
