from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.config.settings.environment import ENVIRONMENTS
from skyrl.envs import Env, EnvStep, find_env, register, registered_names
from skyrl.envs.registry import find_env_of_row
from skyrl.errors import TaskError

EXTRAS = {"reward_spec": {"method": "rule", "ground_truth": "abc"}, "extra_info": {"index": 3}}


def write(folder: Path, text: str) -> str:
    file = folder / "task.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_gsm8k_is_found_by_its_name_and_rewards_the_right_answer() -> None:
    env = find_env("gsm8k")({"reward_spec": {"ground_truth": "1200"}})
    assert env.step("so #### 1,200") == EnvStep(reward=1.0, done=True, answer="1200")
    assert env.step("so 1200") == EnvStep(reward=0.0, done=True)


ASK = ("text2sql", "llm_as_a_judge", "pairwise_judge", "reward_model", "reasoning_gym", "mcp")
"""Environments that need a database, a service or a package to judge anything."""


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name not in ASK])
def test_the_environments_of_a_single_turn_are_done_after_it(name: str) -> None:
    tests = [{"input": "", "output": "4", "testtype": "stdin"}]
    truth = {"reward_spec": {"ground_truth": tests if name in ("code", "lcb") else "4"}}
    env = find_env(name)({**truth, "max_turns": 2})
    assert env.step("five").done is ENVIRONMENTS[name].single_turn


def test_gsm8k_says_which_column_it_misses() -> None:
    with pytest.raises(TaskError, match="ground_truth"):
        find_env("gsm8k")({})


def test_a_reward_function_in_a_file_becomes_an_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "def same(completion, ground_truth, **others):\n    return completion == ground_truth\n")
    env = find_env(f"{file}:same")(EXTRAS)
    assert env.step("abc").reward == 1.0
    assert env.step("abd").reward == 0.0


def test_a_reward_function_sees_the_other_columns_of_the_row(tmp_path: Path) -> None:
    file = write(
        tmp_path, "def index(completion, ground_truth, extra_info, **others):\n    return extra_info['index']\n"
    )
    assert find_env(f"{file}:index")(EXTRAS).step("").reward == 3.0


def test_an_environment_class_in_a_file_is_used_as_it_is(tmp_path: Path) -> None:
    text = (
        "from skyrl.envs import Env, EnvStep\n"
        "class Half(Env):\n"
        "    def step(self, action):\n"
        "        return EnvStep(reward=0.5, done=True)\n"
    )
    assert find_env(f"{write(tmp_path, text)}:Half")({}).step("x").reward == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "Registered: aime, code, gsm8k,"),
        ("no_such_module_anywhere:f", "no_such_module_anywhere cannot be found"),
        ("nowhere/task.py:f", "there is no file nowhere/task.py"),
        ("math:no_such_name", "math has no 'no_such_name'$"),
        ("math:sqtr", r"math has no 'sqtr'; did you mean sqrt\?"),
        ("math:pi", "neither a subclass of skyrl.envs.Env"),
    ],
)
def test_a_task_that_cannot_be_found_says_what_was_looked_for(name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        find_env(name)


def test_a_task_file_that_does_not_import_says_why(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        find_env(f"{write(tmp_path, '1 / 0')}:f")


def test_a_task_file_that_ends_the_process_is_a_task_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="SystemExit"):
        find_env(f"{write(tmp_path, 'import sys; sys.exit(0)')}:f")


def test_a_row_may_name_what_is_registered_or_what_the_configuration_names(tmp_path: Path) -> None:
    own_task = f"{write(tmp_path, 'def f(completion, **others): return 1')}:f"
    assert find_env_of_row("gsm8k", None) is find_env("gsm8k")
    assert find_env_of_row(own_task, own_task) is find_env(own_task)
    with pytest.raises(TaskError, match=r"environment\.env_class only"):
        find_env_of_row(own_task, "gsm8k")


def test_a_registered_name_cannot_be_taken_twice() -> None:
    class Other(Env):
        def step(self, action: str) -> EnvStep:
            return EnvStep(reward=0.0, done=True)

    with pytest.raises(TaskError, match="already registered"):
        register("gsm8k", Other)


def test_the_configuration_knows_the_name_of_every_built_in_environment() -> None:
    ours = [
        name
        for name in registered_names()
        if find_env(name).__module__.startswith("skyrl.envs") and not name.startswith("tests-")
    ]
    assert ours == list(ENVIRONMENTS)
