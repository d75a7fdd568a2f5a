"""Environments as they are written for SkyRL-Gym, with the package itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.envs import find_env
from skyrl.errors import TaskError
from tests.rollout.chats import Says, chat_tokenizer, generator, play, prompt

TASK = """
from typing import Any, Dict

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class GuessEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: Dict[str, Any] = {}):
        super().__init__()
        assert "reward_spec" in extras, "reward_spec field is required"
        self.secret = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras["max_turns"] if "max_turns" in extras else 3
        self.shouts = extras.get("shouts")

    def init(self, prompt):
        prompt[-1]["content"] += " Guess!"
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        right = self.secret in action
        done = right or self.turns >= self.max_turns
        told = [] if done else [{"role": "user", "content": "no"}]
        return BaseTextEnvStepOutput(
            observations=told,
            reward=1.0 if right else 0.0,
            done=done,
            metadata={"right": right},
            postprocessed_action=action.upper() if self.shouts else None,
        )

    def get_metrics(self):
        return {"turns": self.turns, "name": "guess", "right_away": self.turns == 1}
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    file = tmp_path / "guess_env.py"
    file.write_text(TASK, encoding="utf-8")
    return f"{file}:GuessEnv"


async def test_a_class_of_skyrl_gym_plays_as_it_is_written(name: str) -> None:
    tokenizer = chat_tokenizer()
    engine = Says(tokenizer, ["six<|im_end|>", "seven<|im_end|>"], ["a", "b", "c"])
    rollout_generator = generator(engine, tokenizer, max_turns=3)
    rollout_generator._user_env_class = name
    (group,) = await play(rollout_generator, prompt(tokenizer, name, reward_spec={"ground_truth": "seven"}), samples=2)
    assert group.rewards == (1.0, 0.0)
    assert group.trajectories[0].metrics == {"turns": 2.0, "right_away": 0.0}
    assert "go Guess!" in tokenizer.decode(group.trajectories[0].prompt_ids)
    assert "<|im_start|>user\nno<|im_end|>" in tokenizer.decode(group.trajectories[0].response_ids)
    assert [len(row.rewards) for row in group.trajectories] == [2, 3]


def test_a_class_of_skyrl_gym_that_replaces_what_was_sampled_is_refused(name: str) -> None:
    extras = {"reward_spec": {"ground_truth": "7"}, "shouts": True}
    with pytest.raises(TaskError, match="GuessEnv replaces what the policy wrote"):
        find_env(name)(extras).step("seven")
    assert find_env(name)(extras).step("7").reward == 1.0


def test_what_a_class_of_skyrl_gym_asserts_of_its_row_is_what_is_raised(name: str) -> None:
    with pytest.raises(AssertionError, match="reward_spec field is required"):
        find_env(name)({})


def test_an_aggregation_of_ones_own_is_said_not_to_be_called(
    name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    own = TASK.replace(
        "    def get_metrics", "    @staticmethod\n    def aggregate_metrics(m): ...\n    def get_metrics"
    )
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    row = {"reward_spec": {"ground_truth": "7"}}
    for task_name in (name, f"{tmp_path / 'own.py'}:GuessEnv"):
        find_env(task_name)(row)
    assert caplog.text.count("GuessEnv.aggregate_metrics is not called") == 1


@pytest.mark.parametrize(
    "target", ["class Nothing: ...", "class Half:\n    def init(self): ...\n    step = close = init"]
)
def test_another_class_is_no_environment(tmp_path: Path, target: str) -> None:
    file = tmp_path / "no.py"
    file.write_text(target, encoding="utf-8")
    with pytest.raises(TaskError, match="nor an environment of SkyRL-Gym"):
        find_env(f"{file}:{target.split()[1].rstrip(':')}")


GSM8K = "skyrl_gym.envs.gsm8k"
ROW = {"reward_spec": {"ground_truth": "42"}, "max_turns": 2}


@pytest.mark.parametrize(
    ("env_class", "answers", "rewards"),
    [
        ("env:GSM8kEnv", ["6 x 7 is\n#### 42"], [1.0]),
        ("env:GSM8kEnv", ["it is 42"], [0.0]),
        ("multi_turn_env:GSM8kMultiTurnEnv", ["#### 41", "#### 42"], [0.1, 1.0]),
        ("multi_turn_env:GSM8kMultiTurnEnv", ["#### 42"], [1.0]),
    ],
)
def test_the_environments_that_skyrl_gym_brings_run_by_their_names(
    env_class: str, answers: list[str], rewards: list[float]
) -> None:
    """A wrong answer in the right form is paid 0.2 over the number of turns."""
    env = find_env(f"{GSM8K}.{env_class}")(ROW)
    env.init(({"role": "user", "content": "6 x 7?"},))
    steps = [env.step(answer) for answer in answers]
    assert [step.reward for step in steps] == rewards
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
